"""Where prompts come from: JSONL files, or a data set read as a stream."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.chats.rows import Row
from components.contract.errors import TransientError, UserError, one_line


def from_files(paths: list[Path]) -> Iterator[Row]:
    """Yield the rows of each file in turn. Raises :class:`UserError` naming an empty file or the torn line."""
    for path in paths:
        number = 0
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate((line for line in lines if line.strip()), 1):
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise UserError(f"{path.name}: row {number} is not JSON ({error})") from error
                if not isinstance(row, dict):
                    raise UserError(f"{path.name}: row {number} is not a JSON object")
                yield row
        if number == 0:
            raise UserError(
                f"{path}: no prompts in it; a row is {{id?, category?, conversations: [{{role, content}}]}}"
            )


def from_hub(dataset: Any) -> Iterator[Row]:
    """Yield the rows of each split, streamed: nothing is kept on disk. The id falls back to split and row number."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    where = f"dataset.id {dataset.id} at {dataset.revision[:12]}"
    for split in dataset.splits:
        try:
            stream = load_dataset(
                dataset.id, dataset.subset, revision=dataset.revision, split=split, streaming=True, token=None
            )
            for number, row in enumerate(stream):
                yield {"category": split, **row, "id": row.get("id") or row.get("uuid") or f"{split}-{number}"}
        except DatasetNotFoundError as error:
            raise UserError(
                f"{where}: no such data set or revision, or a gated one; accept its terms on the hub and set HF_TOKEN"
            ) from error
        except ValueError as error:
            raise UserError(f"{where}: {one_line(error, 200)}") from error
        except OSError as error:
            raise TransientError(f"{where}: the hub does not answer ({one_line(error, 120)}); try again") from error
