"""Files in the schema of nvidia/Nemotron-Post-Training-Dataset-v2: parquet shards by split, as the hub holds them."""

import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

REPOSITORY = "nvidia/Nemotron-Post-Training-Dataset-v2"
REVISION = "5c89e01dd720ae0f4058445ed49c5fb68a03c76e"
SCHEMA = pa.schema(
    {
        **{name: pa.string() for name in ("uuid", "license", "generator", "version", "category", "reasoning")},
        "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
    }
)


def row(text: str, category: str, row_id: str | None = None, answer: str = "An answer.") -> dict[str, Any]:
    """One row as published: a blank system message, one question, one answer."""
    return {
        "uuid": row_id or str(uuid.uuid5(uuid.NAMESPACE_URL, f"{category}/{text}")),
        "license": "CC BY 4.0",
        "generator": "a model",
        "version": "v2",
        "category": category,
        "reasoning": "off",
        "messages": [
            {"role": "system", "content": ""},
            {"role": "user", "content": text},
            {"role": "assistant", "content": answer},
        ],
    }


def write(folder: Path, split: str, shards: list[Iterable[dict[str, Any]]]) -> list[Path]:
    """Write ``data/<split>-<i>-of-<n>.parquet`` below ``folder``."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    paths = []
    for number, rows in enumerate(shards):
        paths.append(folder / "data" / f"{split}-{number:05d}-of-{len(shards):05d}.parquet")
        pq.write_table(pa.Table.from_pylist(list(rows), SCHEMA), paths[-1], row_group_size=1000)
    return paths


def card(folder: Path, splits: list[str]) -> None:
    """Write the data set's README.md, whose head says which files a split has."""
    lines = [f"  - split: {split}\n    path: data/{split}-*\n" for split in splits]
    head = "---\nconfigs:\n- config_name: default\n  data_files:\n"
    (folder / "README.md").write_text(head + "".join(lines) + "---\n")
