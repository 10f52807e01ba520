"""Acceptance length: 1 + accepted / drafts, pooled over prompts, with a bootstrap interval over prompts.

One record per prompt: ``{id, category, drafts, accepted}`` with ``accepted`` per draft position; from vLLM's counters
or from a replayed drafter alike.
"""

from typing import Any

from components.measure.intervals import difference_interval, ratio_interval

Record = dict[str, Any]


def summarise(records: list[Record], seed: int) -> dict[str, Any]:
    """Return ``value``, ``low``, ``high``, ``n``, ``drafts``, ``per_position`` (shares) and ``by_kind``.

    Prompts without a draft (answers of one token) say nothing and are left out of ``n``; without any prompt left the
    figures are None.
    """
    drafted = [record for record in records if record["drafts"]]
    kinds = sorted({record["category"] for record in drafted})
    by_kind = {kind: _length([record for record in drafted if record["category"] == kind], seed) for kind in kinds}
    return {**_length(drafted, seed), "per_position": _per_position(drafted), "by_kind": by_kind}


def gain(records: list[Record], others: list[Record], seed: int) -> dict[str, Any]:
    """Return how much longer ``records`` are than ``others``, another drafter's on the same prompts in the same order.

    ``value`` is the difference of the two pooled lengths, ``low`` and ``high`` its interval with prompts resampled in
    pairs, ``n`` the prompts on which both drafted.
    """
    pairs = [(one, other) for one, other in zip(records, others, strict=True) if one["drafts"] and other["drafts"]]
    if not pairs:
        return {"value": None, "low": None, "high": None, "n": 0}
    accepted, drafts, other_accepted, other_drafts = (
        [sum(one["accepted"]) for one, _ in pairs],
        [one["drafts"] for one, _ in pairs],
        [sum(other["accepted"]) for _, other in pairs],
        [other["drafts"] for _, other in pairs],
    )
    low, high = difference_interval((accepted, drafts), (other_accepted, other_drafts), seed)
    value = sum(accepted) / sum(drafts) - sum(other_accepted) / sum(other_drafts)
    return {"value": value, "low": low, "high": high, "n": len(pairs)}


def _length(records: list[Record], seed: int) -> dict[str, Any]:
    drafts = [record["drafts"] for record in records]
    accepted = [sum(record["accepted"]) for record in records]
    if not drafts:
        return {"value": None, "low": None, "high": None, "n": 0, "drafts": 0}
    low, high = ratio_interval(accepted, drafts, seed)
    return {
        "value": 1 + sum(accepted) / sum(drafts),
        "low": None if low is None else 1 + low,
        "high": None if high is None else 1 + high,
        "n": len(records),
        "drafts": sum(drafts),
    }


def _per_position(records: list[Record]) -> list[float]:
    drafts = sum(record["drafts"] for record in records)
    return [sum(column) / drafts for column in zip(*(record["accepted"] for record in records), strict=True)]
