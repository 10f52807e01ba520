"""Where prompts come from: JSONL and parquet files, or a data set on the hub read as a stream.

A source is a list of shards, each read from front to back; nothing of it is kept on disk.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.chats.rows import Row, read_lines
from components.contract.errors import TransientError, UserError, one_line

COLUMNS = ("id", "uuid", "category", "conversations", "messages")


@dataclass(frozen=True)
class Shard:
    """One file of a source. ``rows(start)`` yields its rows from number ``start`` on, counted from 0."""

    name: str
    rows: Callable[[int], Iterator[Row]]


def of_files(paths: list[Path]) -> list[Shard]:
    """Return one shard a file: parquet by its suffix, else JSONL."""

    def shard(path: Path) -> Shard:
        read = _parquet if path.suffix == ".parquet" else _jsonl
        return Shard(path.name, lambda start: read(path, start))

    return [shard(path) for path in paths]


def _jsonl(path: Path, start: int) -> Iterator[Row]:
    number = 0
    lines = (line for line in read_lines(path) if line.strip())
    for number, line in enumerate(itertools.islice(lines, start, None), start + 1):
        try:
            row = json.loads(line)
            if "\\u" in line:
                json.dumps(row, ensure_ascii=False).encode()  # an escape may be half a surrogate pair
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path.name}: row {number} is not JSON ({one_line(error, 120)})") from error
        if not isinstance(row, dict):
            raise UserError(f"{path.name}: row {number} is not a JSON object")
        yield row
    if number == start == 0:
        raise UserError(f"{path}: no prompts in it; a row is {{id?, category?, conversations: [{{role, content}}]}}")


def _parquet(path: Path, start: int) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path.name}: not a parquet file ({one_line(error, 120)})") from error
    columns = [name for name in file.schema_arrow.names if name in COLUMNS]
    if not {"conversations", "messages"} & set(columns) or file.metadata.num_rows == 0:
        raise UserError(f"{path.name}: no prompts in it; a row is {{id | uuid, category?, conversations | messages}}")
    batches = file.iter_batches(batch_size=1024, columns=columns)
    while True:
        try:
            batch = next(batches, None)
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path.name}: damaged ({one_line(error, 120)}); fetch it again") from error
        if batch is None:
            return
        if start < batch.num_rows:
            yield from batch.slice(start).to_pylist()
        start = max(start - batch.num_rows, 0)


def of_hub(dataset: Any) -> list[Shard]:
    """Return the shards of each split at the pinned revision; a row's category is its split.

    The token comes from ``HF_TOKEN``. Raises :class:`UserError` for a data set, revision or split that is not there
    and for one whose terms are not accepted, :class:`TransientError` when the hub does not answer.
    """
    from datasets import load_dataset

    shards = []
    for split in dataset.splits:
        with Hub(dataset):
            stream = load_dataset(
                dataset.id, dataset.subset, revision=dataset.revision, split=split, streaming=True, token=None
            )
        count = stream.num_shards
        for index in range(count):
            one = stream.shard(count, index)
            shards.append(Shard(f"{split} {index + 1}/{count}", _rows_of(dataset, split, one)))
    return shards


def _rows_of(dataset: Any, split: str, stream: Any) -> Callable[[int], Iterator[Row]]:
    def rows(start: int) -> Iterator[Row]:
        with Hub(dataset):
            for row in stream.skip(start) if start else stream:
                yield {**row, "category": split}

    return rows


class Hub:
    """Turns the hub's failures into this project's, each with what to do about it."""

    def __init__(self, dataset: Any) -> None:
        self._id = dataset.id
        self._place = f"dataset.id {dataset.id} at {dataset.revision[:12]}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: Any, error: BaseException | None, _trace: Any) -> None:
        import httpx2
        from datasets.exceptions import FileNotFoundDatasetsError
        from huggingface_hub import constants
        from huggingface_hub.errors import GatedRepoError

        if error is None:
            return
        said = one_line(error, 200)
        missing = isinstance(error, FileNotFoundDatasetsError)
        if isinstance(error, GatedRepoError) or (missing and "gated" in said):
            owner, page = self._id.split("/")[0], f"{constants.ENDPOINT}/datasets/{self._id}"
            token = "the one in HF_TOKEN has none" if os.environ.get("HF_TOKEN") else "HF_TOKEN is not set"
            raise UserError(
                f"{self._place}: gated, and an account with access is needed ({token}); accept {owner}'s terms at "
                f"{page} and set HF_TOKEN to a token of that account"
            ) from error
        if missing:
            raise UserError(
                f"{self._place}: no such data set, revision or split, or a private one ({said})"
            ) from error
        if isinstance(error, ValueError):
            raise UserError(f"{self._place}: {said}") from error
        if isinstance(error, OSError | httpx2.HTTPError):
            raise TransientError(f"{self._place}: the hub does not answer ({said}); try again") from error
