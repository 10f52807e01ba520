"""From a source's row to a prompt: which turns stay, and what makes two prompts the same."""

import hashlib
import unicodedata

from components.chats.rows import Row

Turns = list[dict[str, str]]

SYSTEM = "You are a helpful assistant."


def clean(row: Row) -> Turns | None:
    """Return the row's turns without trailing assistant turns; empty without a user turn, None when malformed."""
    turns = row.get("conversations") or row.get("messages")
    if not isinstance(turns, list):
        return None
    kept = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
            return None
        if turn.get("role") not in ("system", "user", "assistant"):
            return None
        kept.append({"role": turn["role"], "content": turn["content"]})
    while kept and kept[-1]["role"] != "user":
        kept.pop()
    return kept if kept and kept[-1]["content"].strip() else []


def with_system(turns: Turns, system: str | None) -> Turns:
    """Return the turns without blank system messages; ``system`` goes first where no system message is left there."""
    kept = [turn for turn in turns if turn["role"] != "system" or turn["content"].strip()]
    if system and kept[0]["role"] != "system":
        kept.insert(0, {"role": "system", "content": system})
    return kept


def text_hash(turns: Turns) -> str:
    """Return the sha256 of the user turns' text, as hex: NFKC, case folded, runs of white space made one."""
    text = "\n".join(turn["content"] for turn in turns if turn["role"] == "user")
    normalised = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return hashlib.sha256(normalised.encode()).hexdigest()
