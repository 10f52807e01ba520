"""The rows of the study ``serving-levers``, from what the engines answered."""

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import study
from cost_shapes import dense_table, drafter_table, packed, read_config

from components.checkpoint.step_bytes import model_of
from components.measure import intervals

if TYPE_CHECKING:
    from serving_levers import Size, Variant

Row = dict[str, Any]
HEAD_GROUP = 128


def table(rows: list[Row], variants: dict[str, "Variant"], size: "Size") -> list[Row]:
    """Return the study's rows: every variant's, and against the reference of the same session."""
    found: list[Row] = []
    for name, variant in variants.items():
        mine = [row for row in rows if row["variant"] == name]
        if not size.shape:
            note = "weights alone: target and head, drafter and its head"
            found.append(study.row(name, "decode_gb_per_step", weight_bytes(variant) / 1e9, "GB", note=note))
        if not any(row["kind"] == "answer" for row in mine):
            said = [row["log"] for row in mine if row["kind"] == "failed"]
            note = f"did not start: {said[-1]}" if said else "not asked: one lease has no room for every cold start"
            found.append(study.row(name, "latency_ms", None, "ms", 0, note=note))
            continue
        starts = [row["seconds"] for row in mine if row["kind"] == "start"]
        found.append(study.row(name, "start_seconds", min(starts), "s", len(starts), note="the shortest"))
        sessions = {row["session"] for row in mine}
        base = [row for row in rows if row["variant"] == "reference" and row["session"] in sessions]
        found += latencies(name, mine, base, size)
        found += steps(name, mine, base, size)
    return found


def latencies(name: str, mine: list[Row], base: list[Row], size: "Size") -> Iterator[Row]:
    """Yield a variant's times by regime and acceptance length, and its mean speed-up over the reference."""
    for accepted in size.accepted:
        pairs = []
        for regime in size.regimes:
            times, theirs = (_times(side, "answer", regime, accepted) for side in (mine, base))
            low, high = intervals.median_interval(times, 0)
            figures = {"low": low, "high": high, "regime": regime, "acceptance": accepted}
            yield study.row(name, "latency_ms", statistics.median(times), "ms", len(times), **figures)
            pairs.append((np.array(times), np.array(theirs)))
        if name == "reference":
            continue

        def speed_up(drawn: np.ndarray, pairs: list[tuple[np.ndarray, np.ndarray]] = pairs) -> np.ndarray:
            ratios = [np.median(theirs[drawn], -1) / np.median(times[drawn], -1) for times, theirs in pairs]
            return np.asarray(np.mean(ratios, axis=0))

        rounds = len(pairs[0][0])
        low, high = intervals.bootstrap(rounds, speed_up, 0)
        value = float(speed_up(np.arange(rounds)))
        figures = {"low": low, "high": high, "acceptance": accepted, "note": "mean over the regimes"}
        yield study.row(name, "speedup_over_reference_config", value, "ratio", rounds, **figures)


def steps(name: str, mine: list[Row], base: list[Row], size: "Size") -> Iterator[Row]:
    """Yield what a decoding step and a prefill take, on the GPU and of the host."""
    for regime in size.regimes:
        busy, waited = step_ms(mine, regime, size)
        wall = f"of {waited:.2f} ms a step by the clock"
        if busy is None:
            yield study.row(name, "host_ms_per_step", waited, "ms", note="no GPU: all of a step", regime=regime)
            continue
        prefill = _one(mine, "prefill on the GPU", regime)["busy_ms"]
        yield study.row(name, "gpu_ms_per_step", busy, "ms", note=wall, regime=regime)
        yield study.row(name, "host_ms_per_step", waited - busy, "ms", note="the GPU idle", regime=regime)
        yield study.row(name, "gpu_ms_prefill", prefill, "ms", regime=regime)
        reference, _ = step_ms(base, regime, size)
        if name != "reference" and reference:
            yield study.row(name, "gpu_time_ratio_to_reference", busy / reference, "ratio", regime=regime)


def step_ms(rows: list[Row], regime: str, size: "Size") -> tuple[float | None, float]:
    """Return the milliseconds of a decoding step in which the GPU was busy (None without one), and by the clock.

    A step is what an answer takes beyond its first token, over the drafts made for it.
    """
    answer, prefill = (_one(rows, f"{kind} on the GPU", regime) for kind in ("answer", "prefill"))
    many = answer["drafts"] - prefill["drafts"]
    busy = None if answer["busy_ms"] is None else (answer["busy_ms"] - prefill["busy_ms"]) / many
    times = _times(rows, "answer", regime, size.accepted[-1])
    waited = statistics.median(times) - statistics.median(_times(rows, "prefill", regime))
    return busy, waited / many


def weight_bytes(variant: "Variant") -> int:
    """Return the bytes of weights that a decoding step of Qwen3.5-4B's pair reads."""
    config = read_config()
    text = config["text_config"]
    target = model_of(packed(dense_table(config), 32), config)
    drafter = model_of(packed(drafter_table(text["hidden_size"]), HEAD_GROUP), {})
    elements = text["vocab_size"] * text["hidden_size"]
    head = 2 * elements if variant.head == 16 else elements * variant.head // 8 + 2 * elements // HEAD_GROUP
    own = 2 * variant.vocabulary * text["hidden_size"] if variant.vocabulary else head
    return target.linears + head + drafter.linears + own


def _one(rows: list[Row], kind: str, regime: str) -> Row:
    return [row for row in rows if row["kind"] == kind and row["regime"] == regime][-1]


def _times(rows: list[Row], kind: str, regime: str, accepted: float | None = None) -> list[float]:
    return [
        1000 * row["seconds"]
        for row in rows
        if row["kind"] == kind and row["regime"] == regime and row.get("acceptance") == accepted
    ]


def about(size: "Size") -> str:
    """Return what a reader of the page must know first."""
    shapes = ", ".join(f"{name} {tokens}/{answer}" for name, (tokens, answer) in size.regimes.items())
    return (
        "The shapes of Qwen3.5-4B and of its published drafter with weights of no content; vLLM accepts as "
        "many drafted tokens as it is told, so a latency is that of an acceptance length and says nothing "
        "about what a lever does to it. Reference: W4A16 target in groups of 32, W4A16 drafter in groups of "
        "128, tied BF16 head, 15 drafted tokens, window 1,024, FLASH_ATTN, 16,384 batched tokens, language "
        "model only, no prefix caching, one sequence, CUDA graphs of 1 and 16 tokens. Input/output tokens: "
        f"{shapes}. Engines stand beside each other on one GPU and are asked in turn, one request at a time, "
        "of fresh random tokens. GPU time is the union of what its profiler saw; a profiled answer less a "
        "profiled prefill, over the drafts."
    )
