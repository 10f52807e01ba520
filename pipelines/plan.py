"""The plan: per task its argv, digest, dependencies and state, before anything starts.

Everything that executes or renders the pipeline reads a :class:`Plan` and nothing else.
"""

import json
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from components.chats.tokenizer import read_chat_template
from components.contract.context import FILES
from components.contract.digest import file_sha256
from components.contract.errors import UserError
from components.contract.invocation import Invocation, invocation
from components.contract.stage import load
from components.select.rows import task_rows
from components.select.stage import Config as SelectConfig
from components.store.artifact import read_manifest
from components.store.backend import Store
from pipelines.cluster import Cluster
from pipelines.dag import LocalFile, Task, build
from pipelines.recipe import Recipe
from pipelines.why import History

State = Literal["cached", "run", "blocked", "skipped"]

_MISSING = "0" * 64


@dataclass(frozen=True)
class Selection:
    """Which tasks may run, by task or stage name. Neither field given: all.

    ``only`` runs those tasks; ``start`` (``--from``) runs those and all that depend on them.
    """

    only: tuple[str, ...] = ()
    start: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedTask:
    """One task of a plan.

    ``argv`` follows the interpreter (``-m components.qad …``). ``needs`` must have succeeded before the task starts;
    ``soft_needs`` must have ended, whatever their exit codes. ``state``: ``cached`` (committed already), ``run``,
    ``blocked`` (selected but cannot run; ``why`` says what is missing), ``skipped`` (not selected, not committed).
    ``files_to_upload`` are (local file, store key) pairs that must be in the store before the task starts. A task that
    is not ``selected`` never starts, not even to say again that its gate is not met.
    """

    name: str
    stage: str
    role: str
    argv: tuple[str, ...]
    needs: tuple[str, ...]
    soft_needs: tuple[str, ...]
    cpu: int
    memory_gb: float
    digest: str
    uri: str
    state: State
    why: str
    files_to_upload: tuple[tuple[Path, str], ...]
    selected: bool = True


@dataclass(frozen=True)
class Plan:
    """The tasks of one recipe on one store, in dependency order."""

    recipe: str
    store: str
    tasks: tuple[PlannedTask, ...]
    cluster: Cluster

    def obstacles(self) -> list[str]:
        """Return what blocks tasks, each with those that it blocks itself: others wait for these."""
        blocked = {task.name: task for task in self.tasks if task.state == "blocked"}
        found: dict[str, list[str]] = {}
        for task in blocked.values():
            if not blocked.keys() & {*task.needs, *task.soft_needs}:
                found.setdefault(task.why, []).append(task.name)
        return [f"{', '.join(names)}: {why}" for why, names in found.items()]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, for ``qdflash plan --json``."""
        tasks = [asdict(task) for task in self.tasks]
        for task in tasks:
            task["files_to_upload"] = [{"file": str(path), "key": key} for path, key in task["files_to_upload"]]
        return {"recipe": self.recipe, "store": self.store, "tasks": tasks}


def make_plan(recipe: Recipe, store: Store, selection: Selection | None = None) -> Plan:
    """Decide what would run. Reads the store, writes nothing.

    Raises :class:`UserError` for a selection that names no task of the recipe.
    """
    tasks = build(recipe)
    selected = _selected(tasks, selection or Selection())
    salts = read_salts(recipe, store)
    calls: dict[str, _Call] = {}
    for task in tasks:
        calls[task.name] = _call(task, store, calls, salts.get(task.name))
    history = History(store, {call.invocation.digest for call in calls.values()})
    planned: dict[str, PlannedTask] = {}
    for task in tasks:
        planned[task.name] = _plan_task(task, calls[task.name], recipe, store, planned, task.name in selected, history)
    return Plan(recipe.name, store.url, tuple(planned.values()), recipe.cluster)


def demand_pods(plan: Plan) -> None:
    """Raise :class:`UserError` for what keeps a plan from running as pods: its store, a blocked task, an image."""
    if not plan.store.startswith("s3://"):
        raise UserError(f"store {plan.store}: pods cannot reach a folder; compile with --store s3://bucket/prefix")
    for task in plan.tasks:
        if task.state == "blocked":
            raise UserError(f"{task.name}: blocked: {task.why}")
        if task.state == "run":
            plan.cluster.image(task.role)


def upload_files(plan: Plan) -> None:
    """Put the local files of the tasks that will run into the store, where pods find them."""
    store = Store(plan.store)
    for task in plan.tasks:
        if task.state == "run":
            for path, key in task.files_to_upload:
                store.upload(path, key)  # also when one is there: it may be damaged


@dataclass(frozen=True)
class _Call:
    """How a task is called: its inputs' addresses by port, the tasks it reads, and files to upload with their keys."""

    invocation: Invocation
    uris: dict[str, list[str]]
    reads: tuple[str, ...]
    uploads: dict[Path, str]
    salt: str | None


def _call(task: Task, store: Store, before: dict[str, _Call], salt: str | None) -> _Call:
    uris: dict[str, list[str]] = {}
    reads: list[str] = []
    uploads: dict[Path, str] = {}
    for port, sources in task.inputs.items():
        for source in sources:
            if isinstance(source, LocalFile):
                sha256 = file_sha256(source.path) if source.path.is_file() else _MISSING
                uploads[source.path] = f"{FILES}/{sha256}/{source.path.name}"
                uri = store.uri(uploads[source.path])
            else:
                uri = before[source].invocation.uri
                reads.append(source)
            uris.setdefault(port, []).append(uri)
    called = invocation(task.stage, store.url, task.config, uris, salt)
    return _Call(called, uris, tuple(dict.fromkeys(reads)), uploads, salt)


def _plan_task(
    task: Task,
    called: _Call,
    recipe: Recipe,
    store: Store,
    before: dict[str, PlannedTask],
    selected: bool,
    history: History,
) -> PlannedTask:
    """Plan one task, given those it reads."""
    module, call = load(task.stage), called.invocation
    memoised = getattr(module, "MEMOISED", True)
    sources_before = [before[name] for name in called.reads]
    state: State
    if memoised and read_manifest(store, task.stage, call.digest):
        state, why = "cached", "committed"
    elif not selected:
        state, why = "skipped", "not selected, not committed"
    elif obstacle := _obstacle(task, list(called.uploads), sources_before):
        state, why = "blocked", obstacle
    elif not memoised:
        state, why = "run", "runs every time"
    else:
        running = {one.uri: one.name for one in sources_before if one.state == "run"}
        state = "run"
        why = history.explain(task.stage, module.VERSION, task.config, called.uris, called.salt, running)
    resources = recipe.resources[task.name]
    return PlannedTask(
        name=task.name,
        stage=task.stage,
        role=module.ROLE,
        argv=call.argv,
        needs=tuple(one.name for one in sources_before if one.name not in task.tolerates),
        soft_needs=task.tolerates,
        cpu=resources.cpu,
        memory_gb=resources.memory_gb,
        digest=call.digest,
        uri=call.uri,
        state=state,
        why=why,
        files_to_upload=tuple(called.uploads.items()),
        selected=selected,
    )


def _obstacle(task: Task, files: list[Path], sources: list[PlannedTask]) -> str | None:
    """Say what keeps a selected task from running, or None."""
    for path in files:
        if not path.is_file():
            return f"{path}: no such file"
    drawn_from = [one.path for one in task.inputs.get("files", ()) if isinstance(one, LocalFile)]
    if drawn_from and all(path.suffix == ".jsonl" for path in drawn_from):
        rows, count = sum(map(_rows, drawn_from)), getattr(task.config, "count", 0)
        if rows < count:
            return f"count {count}: its files hold {rows} prompts"
    if isinstance(task.config, SelectConfig):  # days of training come before it
        try:
            for path in files:
                task_rows(path.name, path, task.config.items)
        except UserError as error:
            return str(error)
    if "chat_template" in task.inputs:
        try:
            read_chat_template(*files)
        except UserError as error:
            return str(error)
    for source in sources:
        if source.state == "blocked":
            return f"below {source.name}, which is blocked"
        if source.state == "skipped":
            return f"{source.name} is not committed and not selected"
    return None


def _rows(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _selected(tasks: list[Task], selection: Selection) -> set[str]:
    """Return the names of the tasks that may run."""
    if not selection.only and not selection.start:
        return {task.name for task in tasks}
    chosen = _expand(tasks, selection.only) | _expand(tasks, selection.start)
    below = _expand(tasks, selection.start)
    for task in tasks:
        read = {source for sources in task.inputs.values() for source in sources if isinstance(source, str)}
        if read & below:
            below.add(task.name)
    return chosen | below


def _expand(tasks: list[Task], names: Iterable[str]) -> set[str]:
    """Turn task and stage names into task names."""
    found = set()
    for name in names:
        matches = {task.name for task in tasks if name in (task.name, task.stage)}
        if not matches:
            raise UserError(
                f"{name}: no such task or stage in this recipe; there are {', '.join(t.name for t in tasks)}"
            )
        found |= matches
    return found


def read_salts(recipe: Recipe, store: Store) -> dict[str, str]:
    """Return the salts of forced tasks, by task name."""
    data = store.read(_salts_key(recipe))
    try:
        salts = json.loads(data) if data else {}
        if not isinstance(salts, dict):
            raise ValueError
    except ValueError as error:
        raise UserError(f"{store.uri(_salts_key(recipe))}: not readable; remove it, then --force anew") from error
    return salts


def force(recipe: Recipe, store: Store, names: Iterable[str]) -> None:
    """Record a new salt for each named task or stage (``--force``): it and everything below gets a new digest."""
    forced = {name: uuid.uuid4().hex[:12] for name in sorted(_expand(build(recipe), names))}
    store.write(_salts_key(recipe), json.dumps(read_salts(recipe, store) | forced, indent=1).encode())


def unforce(recipe: Recipe, store: Store, names: list[str]) -> None:
    """Forget the salts of the named tasks or stages (``--unforce``).

    Raises :class:`UserError` when none of them is forced.
    """
    named, salts = _expand(build(recipe), names), read_salts(recipe, store)
    if not named & salts.keys():
        forced = f"forced {'are' if len(salts) > 1 else 'is'} {', '.join(salts)}" if salts else "nothing is"
        raise UserError(f"--unforce {' '.join(names)}: not forced in recipe {recipe.name}; {forced}")
    kept = {name: salt for name, salt in salts.items() if name not in named}
    store.write(_salts_key(recipe), json.dumps(kept, indent=1).encode())


def _salts_key(recipe: Recipe) -> str:
    return f"_salts/{recipe.name}.json"


_COLOURS = {"cached": "green", "run": "yellow", "blocked": "red", "skipped": "dim"}


def render_table(plan: Plan) -> Table:
    """Return a table of the plan for people."""
    table = Table(title=escape(f"{plan.recipe} on {plan.store}"), title_justify="left")
    for column in ("task", "role", "digest", "state"):
        table.add_column(column, no_wrap=True)
    table.add_column("why", overflow="fold")
    table.add_column("cpu", justify="right")
    table.add_column("GB", justify="right")
    for task in plan.tasks:
        state = f"[{_COLOURS[task.state]}]{task.state}[/]"
        digest, memory = task.digest[:12], f"{task.memory_gb:g}"
        table.add_row(task.name, task.role, digest, state, escape(task.why), str(task.cpu), memory)
    return table
