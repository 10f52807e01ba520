"""Where prompts come from: JSONL and parquet files here, or a data set's (:mod:`components.prompts.hub`).

A source is a list of shards, each read from front to back.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from components.chats.rows import Row, parse_row, read_lines
from components.contract.errors import UserError, one_line

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
            row = parse_row(line)
        except ValueError as error:
            raise UserError(f"{path.name}: row {number} is not JSON ({one_line(error, 120)})") from error
        yield row
    if number == start == 0:
        raise UserError(f"{path}: no prompts in it; a row is {{id?, category?, conversations: [{{role, content}}]}}")


def _parquet(path: Path, start: int) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path, pre_buffer=False)  # which would hold all of it
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path.name}: not a parquet file ({one_line(error, 120)})") from error
    columns = [name for name in file.schema_arrow.names if name in COLUMNS]
    if not {"conversations", "messages"} & set(columns) or file.metadata.num_rows == 0:
        raise UserError(f"{path.name}: no prompts in it; a row is {{id | uuid, category?, conversations | messages}}")
    batches = file.iter_batches(batch_size=1024, columns=columns)
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                return
            rows = batch.slice(start).to_pylist() if start < batch.num_rows else []
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(f"{path.name}: damaged ({one_line(error, 120)}); fetch it again") from error
        yield from rows
        start = max(start - batch.num_rows, 0)
