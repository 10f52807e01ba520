"""What was made from what, as an inline SVG: each artifact below all that it was made from."""

from collections.abc import Sequence
from html import escape

from components.report.collect import TaskRecord

WIDTH, HEIGHT = 118, 34
ACROSS, DOWN = 12, 34
Place = tuple[float, float]


def drawing(tasks: Sequence[TaskRecord]) -> str:
    """Return the SVG; every artifact bears its task and the start of its digest, and links to its row of the page.

    No line leads to what one of the other lines leads to as well (the transitive reduction).
    """
    rows = generations(tasks)
    places = _places(rows)
    wide = max((len(row) for row in rows), default=0) * (WIDTH + ACROSS) + ACROSS
    high = len(rows) * (HEIGHT + DOWN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="lineage" width="{wide}" height="{high}" '
        f'viewBox="0 0 {wide} {high}" role="img" aria-label="What was made from what">'
    ]
    above: dict[str, set[str]] = {}
    for task in (task for row in rows for task in row):
        makers = _makers(task) & places.keys()
        beyond = set().union(*(above[maker] for maker in makers))
        above[task.uri] = makers | beyond
        parts += [_line(places[maker], places[task.uri]) for maker in sorted(makers - beyond)]
    for task in tasks:
        x, y = places[task.uri]
        parts.append(
            f'<a href="#{task.digest}"><rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="5"/>'
            f'<text x="{x + WIDTH / 2:g}" y="{y + 14:g}">{escape(task.name)}</text>'
            f'<text x="{x + WIDTH / 2:g}" y="{y + 27:g}" class="digest">{task.digest[:12]}</text></a>'
        )
    return "".join([*parts, "</svg>"])


def generations(tasks: Sequence[TaskRecord]) -> list[list[TaskRecord]]:
    """Return the tasks in rows: each below all that it was made from, and near what was made from it.

    What nothing was made from stands right below its makers, anything else right above the first that it made.
    """
    makers = {task.uri: _makers(task) & {one.uri for one in tasks} for task in tasks}
    made = {uri: [other for other in makers if uri in makers[other]] for uri in makers}
    first: dict[str, int] = {}
    last: dict[str, int] = {}

    def highest(uri: str) -> int:
        if uri not in first:
            first[uri] = 1 + max(map(highest, makers[uri]), default=-1)
        return first[uri]

    def lowest(uri: str) -> int:
        if uri not in last:
            last[uri] = min(map(lowest, made[uri])) - 1 if made[uri] else highest(uri)
        return last[uri]

    rows: list[list[TaskRecord]] = [[] for _ in range(1 + max(map(lowest, makers), default=-1))]
    for task in tasks:
        rows[last[task.uri]].append(task)
    return rows


def _makers(task: TaskRecord) -> set[str]:
    return {uri for uris in task.inputs.values() for uri in uris}


def _places(rows: list[list[TaskRecord]]) -> dict[str, Place]:
    """Return the upper left corner of each: rows are centred, and ordered by where their makers stand."""
    widest = max((len(row) for row in rows), default=0)
    found: dict[str, Place] = {}

    def above(task: TaskRecord) -> float:
        columns = [found[uri][0] for uri in _makers(task) if uri in found]
        return sum(columns) / len(columns) if columns else 0.0

    for number, row in enumerate(rows):
        start = ACROSS + (widest - len(row)) * (WIDTH + ACROSS) / 2
        placed = sorted(row, key=above)
        found |= {
            task.uri: (start + column * (WIDTH + ACROSS), number * (HEIGHT + DOWN) + DOWN / 2)
            for column, task in enumerate(placed)
        }
    return found


def _line(maker: Place, made: Place) -> str:
    x, y = maker[0] + WIDTH / 2, maker[1] + HEIGHT
    to_x, to_y = made[0] + WIDTH / 2, made[1]
    return f'<path d="M{x:g} {y:g}C{x:g} {y + DOWN:g} {to_x:g} {to_y - DOWN:g} {to_x:g} {to_y:g}"/>'
