"""Counts over regenerated rows: what the report and the manifest say about them."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from components.chats.rows import Row


def statistics(rows: Iterable[Row]) -> dict[str, Any]:
    """Count rows, tokens and finish reasons, in all and per category. Truncated: ``finish_reason`` is ``length``."""
    total: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    categories: dict[str, Counter[str]] = {}
    for row in rows:
        counts = Counter(
            rows=1,
            prompt_tokens=len(row["prompt_token_ids"]),
            generated_tokens=len(row["token_ids"]),
            truncated=int(row["finish_reason"] == "length"),
        )
        total.update(counts)
        reasons[row["finish_reason"]] += 1
        categories.setdefault(row["category"], Counter()).update(counts)
    return {
        **_shares(total),
        "finish_reasons": dict(sorted(reasons.items())),
        "categories": {name: _shares(counts) for name, counts in sorted(categories.items())},
    }


def _shares(counts: Counter[str]) -> dict[str, Any]:
    rows = counts["rows"]
    return {
        "rows": rows,
        "prompt_tokens": counts["prompt_tokens"],
        "generated_tokens": counts["generated_tokens"],
        "truncated_share": round(counts["truncated"] / rows, 4) if rows else None,
    }
