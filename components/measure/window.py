"""The window suite: a drafter with full attention and with windows, one server each, nothing retrained.

The same prompts at every length: real ones behind generated sentences, answered greedily, one at a time.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from components.bundle.window import with_window
from components.measure import latency, suites
from components.measure.answers import Prompt
from components.measure.intervals import median_interval
from components.measure.ledger import Ledger
from components.serving.server import Server

if TYPE_CHECKING:
    from components.contract.context import Output
    from components.measure.stage import Config

FULL = "none"
Row = dict[str, Any]


def measure(
    config: "Config", target: Path, drafter: Path, prompts: list[Prompt], tokenizer: Any, output: "Output"
) -> Row:
    """Measure full attention and every one of ``config.windows`` at every length of ``config.latency``.

    Returns:
        ``by_window`` {window or ``none``: {``lengths`` {regime: {``acceptance_length``, ``latency``}}, ``keeps``}} and
        ``chosen``, a window or None; see :func:`choose`.
    """
    alone = config.answers.model_copy(update={"concurrent_prompts": 0})
    config = config.model_copy(update={"answers": alone})
    found: dict[str, Any] = {}
    ledger = Ledger(output, len(prompts) * len(config.latency) * len({None, *config.windows}))
    folders = {window: output.scratch / f"window-{window or FULL}" for window in (None, *config.windows)}
    for window, folder in folders.items():
        with_window(drafter, folder, window)
    for window, folder in folders.items():
        name = str(window or FULL)
        with Server(target, folder, config.profile, log_path=output.scratch / f"server-{name}.log") as server:
            server.wait()
            found[name] = {"lengths": {}}
            for regime, wanted in config.latency.items():
                where = replace(output, path=output.path / name / regime)
                where.path.mkdir(parents=True)
                bench = suites.Bench(config, tokenizer, server.client, ledger, where)
                asked = [behind(prompt, wanted.input_tokens, tokenizer, f"{name}/{regime}") for prompt in prompts]
                samples = suites.greedy(bench, asked)
                times = [1000 * sample["seconds"] for sample in samples]
                low, high = median_interval(times, config.seed)
                found[name]["lengths"][regime] = {
                    "acceptance_length": suites.measure_acceptance(bench, samples, None),
                    "latency": {"median_ms": median(times), "low": low, "high": high, "n": len(times)},
                }
    return choose(found, max(config.latency, key=lambda regime: config.latency[regime].input_tokens))


def behind(prompt: Prompt, length: int, tokenizer: Any, key: str) -> Prompt:
    """Return a prompt behind generated sentences, ``length`` tokens in all where it is shorter; ``key`` names it.

    The sentences depend on the prompt alone, so that every window is asked the same.
    """
    ids = prompt["prompt_token_ids"]
    ahead = latency.prompt_of_length(tokenizer, max(0, length - len(ids)), f"window/{prompt['id']}")
    return {**prompt, "id": f"{key}/{prompt['id']}", "prompt_token_ids": [*ahead, *ids]}


def choose(by_window: Row, longest: str) -> Row:
    """Say which windows keep the acceptance, and choose the fastest of these at the ``longest`` length.

    A window keeps it when at every length its acceptance length is not below full attention's interval. Full attention
    (None) is chosen when it is the fastest or no window keeps it.
    """
    full = by_window[FULL]["lengths"]
    for one in by_window.values():
        one["keeps"] = all(
            _at_least(one["lengths"][regime]["acceptance_length"]["value"], full[regime]["acceptance_length"]["low"])
            for regime in full
        )
    kept: Iterable[str] = [name for name, one in by_window.items() if one["keeps"] or name == FULL]
    fastest = min(kept, key=lambda name: by_window[name]["lengths"][longest]["latency"]["median_ms"])
    return {"by_window": by_window, "chosen": None if fastest == FULL else int(fastest)}


def _at_least(value: float | None, low: float | None) -> bool:
    """Without an interval (fewer than two prompts that were drafted for) nothing is known."""
    return value is not None and low is not None and value >= low
