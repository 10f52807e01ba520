"""What one answer becomes: its seed, its reasoning and text, its row."""

import hashlib
from typing import Any

from components.chats.rows import Row

OPEN, CLOSE = "<think>", "</think>"


def row_seed(row_id: str, seed: int) -> int:
    """Return the sampling seed of one row, 0 to 2**31 - 1: from its id and the base seed, whatever the order."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{row_id}".encode()).digest()[:4], "big") >> 1


def split_reasoning(text: str, prompt: str, thinking: bool) -> tuple[str | None, str]:
    """Split an answer into reasoning and text.

    ``prompt`` is the rendered prompt: some templates open the thought there. A thought that was never closed stays
    reasoning, with an empty text, so that nobody takes it for an answer.
    """
    if not thinking:
        return None, text
    before, close, after = text.partition(CLOSE)
    is_open = prompt.rstrip().endswith(OPEN) or text.lstrip().startswith(OPEN)
    if not close and not is_open:
        return None, text
    return before.lstrip().removeprefix(OPEN).strip("\n"), after.lstrip("\n")


def answered(row: Row, request: Any, split: tuple[str | None, str], sampling: dict[str, Any], model: str) -> Row:
    """Return the regenerated row of a prompt row and its finished vLLM request (``vllm.RequestOutput``).

    ``split`` is what :func:`split_reasoning` made of its text.
    """
    answer = request.outputs[0]
    reasoning, text = split
    return {
        **row,
        "prompt_token_ids": list(request.prompt_token_ids),
        "token_ids": list(answer.token_ids),
        "text": text,
        "reasoning": reasoning,
        "finish_reason": answer.finish_reason,
        "sampling": sampling,
        "seed": row_seed(row["id"], sampling["seed"]),
        "model": model,
    }
