"""JSONL shards of chats.

A prompt row is ``{id, category, conversations: [{role, content}]}``, ending on a user turn. A regenerated row adds
``prompt_token_ids``, ``token_ids`` (the answer's ids, as vLLM produced them, stop token included when it was
produced), ``text``, ``reasoning`` (or null), ``finish_reason`` (``stop`` or ``length``), ``sampling`` and ``seed``.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from components.contract.errors import UserError

Row = dict[str, Any]


def read_rows(place: Path) -> Iterator[Row]:
    """Yield the rows of a file, or of every ``*.jsonl`` in a folder; a torn line is an error that names it."""
    for path in [place] if place.is_file() else sorted(place.glob("*.jsonl")):
        for number, line in enumerate(read_lines(path), 1):
            try:
                row = parse_row(line)
            except ValueError as error:
                raise UserError(f"{path}:{number}: not a JSON row ({error}); the file is torn or not JSONL") from error
            yield row


def parse_row(line: str) -> Row:
    """Return a line's row.

    Raises:
        ValueError: it is no JSON object, or a text of it ends in half a surrogate pair, which nothing can encode.
    """
    try:
        row = json.loads(line)
        if "\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError("no JSON object")
    return row


def prompts_of(place: Path) -> Iterator[Row]:
    """Yield the rows of a file or folder of prompts; one without an id or a conversation is an error."""
    for row in read_rows(place):
        if not isinstance(row.get("id"), str) or not _is_chat(row.get("conversations")):
            raise UserError(f"{place}: a row is no prompt {{id, conversations: [{{role, content}}]}}; is it a draw?")
        yield row


def _is_chat(turns: Any) -> bool:
    return isinstance(turns, list) and all(
        isinstance(one, dict) and {"role", "content"} <= one.keys() for one in turns
    )


def read_lines(path: Path) -> Iterator[str]:
    """Yield a text file's lines; a byte order mark is not part of the first. Other encodings are an error."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error}); convert it") from error


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """Write one shard; return the number of rows."""
    count = 0
    with path.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
            count += 1
    return count


def is_held_out(row_id: str, fraction: float) -> bool:
    """Say whether a row belongs to the held-out split: by hash of its id, so every stage agrees.

    ``fraction`` is the expected share of held-out rows, 0 to 1.
    """
    import hashlib

    return int(hashlib.sha256(f"held-out:{row_id}".encode()).hexdigest()[:8], 16) < fraction * 2**32
