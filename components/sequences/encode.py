"""Token ids for rows that come as text: rendered with the model's template, then encoded in batches.

Rendering is Python on one core; encoding is Rust on all of them and leaves Python free. A thread encodes one batch
while the next is rendered; no more than two batches are in memory.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from components.chats.rows import Row
from components.chats.template import Template, render_answered
from components.contract.errors import UserError, one_line

BATCH = 256


def with_token_ids(rows: Iterable[Row], tokenizer: Any, template: Template) -> Iterator[Row]:
    """Yield the rows in order; those without ``token_ids`` get them, and ``prompt_token_ids`` and ``finish_reason``.

    Such a row's ``conversations`` end on an assistant turn. Prompt and answer are encoded apart, as they are when the
    model writes the answer; the prompt's ids are those that regeneration would feed it.

    Raises:
        UserError: naming the row that cannot be rendered, an unfinished answer among them: a template would end it.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    pending: deque[tuple[list[Row], Future[list[Any]]]] = deque()
    with ThreadPoolExecutor(1, "encode") as thread:
        for batch in _batches(rows):
            texts = _render([row for row in batch if "token_ids" not in row], tokenizer, template)
            pending.append((batch, thread.submit(backend.encode_batch_fast, texts, add_special_tokens=False)))
            if len(pending) > 1:
                yield from _filled(*pending.popleft())
        while pending:
            yield from _filled(*pending.popleft())


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while batch := list(itertools.islice(iterator, BATCH)):
        yield batch


def _render(rows: list[Row], tokenizer: Any, template: Template) -> list[str]:
    """Return each prompt and, after it, its answer."""
    if not rows:
        return []
    if unfinished := [row for row in rows if row.get("finish_reason") == "length"]:
        raise UserError(
            f"row {unfinished[0].get('id')}: an unfinished answer (finish_reason length) as text, which the chat "
            "template would end; give its token ids, or set truncated: drop"
        )
    try:
        rendered = render_answered(tokenizer, [row["conversations"] for row in rows], template)
    except Exception as error:  # templates raise what they like
        if len(rows) > 1:
            return [text for row in rows for text in _render([row], tokenizer, template)]
        raise UserError(
            f"row {rows[0].get('id')}: {one_line(error, 200)}; give token ids, or a chat that ends on an answer"
        ) from error
    return [text for pair in rendered for text in pair]


def _filled(batch: list[Row], future: Future[list[Any]]) -> Iterator[Row]:
    encodings = iter(future.result())
    for row in batch:
        if "token_ids" in row:
            yield row
        else:
            ids = {"prompt_token_ids": next(encodings).ids, "token_ids": next(encodings).ids}
            yield {"finish_reason": "stop", **row, **ids}
