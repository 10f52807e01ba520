"""What ``qdflash bench`` prints: one table a kind of measurement, a row a figure, intervals in brackets."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Row = dict[str, Any]
Cells = Iterator[tuple[str, ...]]


def show(console: Console, result: Row) -> None:
    """Print a result: whom it is about, its tables, and what of it does not hold."""
    for label, server in zip(("measured", "compared with"), result["servers"], strict=False):
        of = f"{server['model']} ({server['root']})" if server["root"] else server["model"]
        console.print(f"{label}: {server['url']} serves {of}", markup=False, highlight=False, soft_wrap=True)
    headers, rows = _KINDS[result["kind"]]
    table = Table(box=None)
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number else "left", overflow="fold")
    for cells in rows(result):
        table.add_row(*map(escape, cells))
    console.print(table)
    if result["kind"] == "parity" and not result["comparison"]:
        console.print(
            "One server, compared with itself. Name a second one, say without a drafter, to compare the two."
        )
    console.print("In brackets 95 % intervals.", style="dim")


def faults(result: Row) -> list[str]:
    """Say what of a parity result does not hold, one phrase each."""
    found = []
    for label, compared in _compared(result):
        if not compared["passed"]:
            found.append(f"{label}: {compared['broken']} of {compared['compared']} answers differ, {_first(compared)}")
    for name, sample in _samples(result):
        if not sample["passed"]:
            found.append(f"samples at {name} differ (p = {sample['p']:.2g})")
    return found


def _latency(result: Row) -> Cells:
    comparison = result["comparison"] or {"speedup": {"regimes": {}, "mean": None}}
    for regime in result["figures"][0]:
        for number, figures in enumerate(result["figures"]):
            one = figures[regime]
            yield (
                regime if number == 0 else "  compared with",
                _figure(one, "median_ms", 1),
                f"{one['p95_ms']:.1f}",
                f"{one['ttft_ms']:.1f}",
                f"{one['ttft_p95_ms']:.1f}",
                f"{one['per_token_ms']:.2f}",
                f"{one['tokens_per_second']:.1f}",
                f"{one['tokens']:.0f}",
                f"{one['n']}",
                f"{one['failed']}",
            )
        if speedup := comparison["speedup"]["regimes"].get(regime):
            yield "  times faster", _figure(speedup, "value", 2), *[""] * 8
    if mean := comparison["speedup"]["mean"]:
        yield "mean of the regimes, one request at a time", _figure(mean, "value", 2), *[""] * 8


def _acceptance(result: Row) -> Cells:
    for number, figures in enumerate(result["figures"]):
        yield _side(number, "all prompts"), _figure(figures, "value", 3), str(figures["n"]), str(figures["drafts"])
        for kind, one in figures["by_kind"].items():
            yield f"  {kind}", _figure(one, "value", 3), str(one["n"]), str(one["drafts"])
        mean = sum(one["value"] for one in figures["by_kind"].values()) / len(figures["by_kind"])
        yield "  mean of the categories", f"{mean:.3f}", "", ""
        shares = " ".join(f"{share:.3f}" for share in figures["per_position"])
        yield "  share accepted by position", shares, "", ""
    if result["comparison"]:
        gain = result["comparison"]["gain"]
        yield "gained over the other, in pairs", _figure(gain, "value", 3), str(gain["n"]), ""


def _parity(result: Row) -> Cells:
    for label, compared in _compared(result):
        verdict = "holds" if compared["passed"] else "BROKEN"
        rule = "none may part" if compared["exact"] else "near-ties may part"
        counts = f"{compared['equal']} equal, {compared['ties']} ties, {compared['broken']} broken"
        yield label, verdict, f"{counts} of {compared['compared']}; {rule}"
        if compared["logprobs"]["compared"]:
            gaps = compared["logprobs"]
            yield "  logprobs", "", f"{gaps['max_gap']:.2g} nat apart at most, {gaps['mean_gap']:.2g} on average"
        if not compared["passed"]:
            yield "  first difference", "", _first(compared)
    for number, figures in enumerate(result["figures"]):
        for name, one in figures["repeated"].items():
            yield _side(number, f"asked again, {name}"), "", f"{one['equal']} of {one['compared']} the same"
    for name, one in _samples(result):
        power = ", ".join(f"{float(share):.0%}: {found:.2f}" for share, found in one["power"].items())
        said = f"p = {one['p']:.3f}; {one['draws']} continuations of {one['tokens']} tokens"
        yield f"samples, {name}", "holds" if one["passed"] else "BROKEN", said
        yield "  power, by share of wrong continuations", "", power


def _quality(result: Row) -> Cells:
    paired = (result["comparison"] or {}).get("paired", {})
    for suite in result["figures"][0]:
        for number, figures in enumerate(result["figures"]):
            one = figures[suite]
            yield (
                suite if number == 0 else "  compared with",
                _figure(one, "score", 3) + ("" if one["power"] else " no power"),
                f"{one['n']}",
                f"{one['truncated']:.1%}",
                f"{one['chance']:.3f}",
                f"{one['shots']} shots, thinking {'on' if one['thinking'] else 'off'}, {one['max_tokens']} tokens",
            )
        if one := paired.get(suite):
            items = f"{one['gained']} gained, {one['lost']} lost"
            yield "  difference, in pairs", _figure(one, "value", 3), str(one["n"]), "", "", items


_KINDS = {
    "latency": (
        ("", "median, ms", "p95", "TTFT, ms", "p95", "ms a token", "tokens/s", "tokens", "n", "failed"),
        _latency,
    ),
    "acceptance": (("", "acceptance length", "prompts", "drafts"), _acceptance),
    "parity": (("", "", ""), _parity),
    "quality": (("", "score", "items", "cut", "chance", "protocol"), _quality),
}


def _compared(result: Row) -> Iterator[tuple[str, Row]]:
    """Yield every comparison of greedy answers with what it compares."""
    if result["comparison"]:
        yield "with the other server", result["comparison"]["greedy"]
    for number, figures in enumerate(result["figures"]):
        yield _side(number, "alone and in company"), figures["alone_and_together"]


def _samples(result: Row) -> Iterable[tuple[str, Row]]:
    """Return every test of sampled continuations with how they were sampled."""
    return (result["comparison"] or {}).get("sampled", {"tests": {}})["tests"].items()


def _side(number: int, text: str) -> str:
    return text if number == 0 else f"the other: {text}"


def _first(compared: Row) -> str:
    wrong = [one for one in compared["differences"] if not one["tie"]] or compared["differences"]
    if not wrong:
        return "none shown"
    one = wrong[0]
    return (
        f"prompt {one['id']} at token {one['position']} after {one['before']!r}: "
        f"{one['here']['text']!r}, not {one['baseline']['text']!r}"
    )


def _figure(figure: Row, key: str, digits: int) -> str:
    """Return ``0.412 [0.380, 0.441]``."""
    if figure[key] is None:
        return "–"
    interval = ""
    if figure["low"] is not None:
        interval = f" [{figure['low']:.{digits}f}, {figure['high']:.{digits}f}]"
    return f"{figure[key]:.{digits}f}{interval}"
