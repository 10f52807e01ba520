"""Acceptance length: 1 + accepted / drafts, pooled over prompts, with a bootstrap interval over prompts.

One record per prompt: ``{id, category, drafts, accepted}`` with ``accepted`` per draft position; from vLLM's counters
or from a replayed drafter alike.
"""

from typing import Any

from components.measure.intervals import ratio_interval

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
