"""What the two drafter stages and gptq of a recipe must have in common, said before anything runs."""

from typing import Any

ARCHITECTURE = (
    "layers",
    "heads",
    "key_value_heads",
    "head_dim",
    "intermediate_size",
    "block_size",
    "taps",
    "mask_token",
    "draft_vocabulary",
    "window",
)


def faults(configs: dict[str, Any]) -> list[str]:
    """Demand that the second drafter is the first one's kind, and that its widths suit gptq's groups."""
    first, second, gptq = configs["drafter_1"], configs["drafter_2"], configs["gptq"]
    if not first or not second or not gptq:
        return []
    found = [
        f"drafter_2.{name}: {getattr(second, name)}, but it starts from drafter_1, which has {getattr(first, name)}; "
        f"set drafter.{name}"
        for name in ARCHITECTURE
        if getattr(first, name) != getattr(second, name)
    ]
    if second.group_size % gptq.group_size:
        found.append(
            f"gptq.group_size: {gptq.group_size} does not divide drafter.group_size {second.group_size}, for which "
            "the drafter's widths are checked; set both"
        )
    return found
