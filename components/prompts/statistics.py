"""What a draw says about itself: rows read, dropped and why, drawn, and how long the prompts are."""

from collections import Counter, defaultdict
from typing import Any

from components.prompts.pool import Pool
from components.prompts.read import Parts


def by_category(parts: Parts, pool: Pool) -> dict[str, dict[str, Any]]:
    """Return ``{drawn, usable, dropped: {reason: rows}}`` of each category, sorted by its name.

    ``usable`` prompts could be drawn; those drawn are among them. Only prompts that a draw came to were measured, so
    more of them may be too long.
    """
    found: dict[str, dict[str, Any]] = defaultdict(lambda: {"drawn": 0, "usable": 0, "dropped": Counter()})
    for name in parts.names():
        for category, reason, count in parts.about(name)["dropped"]:
            found[category]["dropped"][reason] += count
    for category, state, count in pool.count():
        if state in (None, "drawn"):
            found[category]["usable"] += count
            found[category]["drawn"] += count if state else 0
        else:
            found[category]["dropped"][state] += count
    return {
        category: {**one, "dropped": dict(sorted(one["dropped"].items()))} for category, one in sorted(found.items())
    }


def dropped(categories: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Return the rows dropped over all categories, by reason."""
    total: Counter[str] = Counter()
    for one in categories.values():
        total.update(one["dropped"])
    return dict(sorted(total.items()))


def statistics(parts: Parts, pool: Pool, lengths: Counter[int], missing: dict[str, int]) -> dict[str, Any]:
    """Return the stage's statistics. ``lengths`` maps lengths in tokens to prompts drawn.

    The histogram maps upper bounds in tokens, powers of two from 64 on, to the prompts up to each and above the one
    before it.
    """
    categories = by_category(parts, pool)
    histogram: Counter[int] = Counter()
    for tokens, count in lengths.items():
        histogram[max(64, 1 << (tokens - 1).bit_length())] += count
    prompts = lengths.total()
    return {
        "prompts": prompts,
        "read": sum(parts.about(name)["read"] for name in parts.names()),
        "usable": sum(one["usable"] for one in categories.values()),
        "dropped": dropped(categories),
        "categories": categories,
        "missing": missing,
        "prompt_tokens": {
            "mean": round(sum(tokens * count for tokens, count in lengths.items()) / prompts, 1),
            "longest": max(lengths),
            "histogram": {str(bound): histogram[bound] for bound in sorted(histogram)},
        },
    }
