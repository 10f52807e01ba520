"""Data sets on the Hugging Face hub: each file comes from there once, into the store, and every draw reads it there.

The copy of a file lies under ``_datasets/<owner>/<name>/<revision>/<file>/``: its bytes, then an index of their size
and sha256. Without an index, or with other bytes, there is no copy. A lease keeps two draws from copying one file.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.chats.rows import Row
from components.contract.digest import file_sha256
from components.contract.errors import TransientError, UserError, of_machine, one_line
from components.contract.log import Log
from components.prompts.sources import Shard, of_files
from components.store.backend import Store
from components.store.lease import Lease

FOLDER = "_datasets"
LEASE = "lease.json"


def of_hub(dataset: Any, store: Store, scratch: Path, log: Log) -> list[Shard]:
    """Return the shards of each split at the pinned revision, one a file; a row's category is its split.

    The token comes from ``HF_TOKEN``; the hub is asked for the list of files by each draw. ``scratch`` holds one file
    at a time. Raises :class:`UserError` for a data set, revision or split that is not there and for one whose terms
    are not accepted, :class:`TransientError` when the hub does not answer.
    """
    from datasets import load_dataset_builder

    if Path(dataset.id).exists():
        raise UserError(f"dataset.id {dataset.id}: a folder of this name is here and would be read; run elsewhere")
    hub = Hub(dataset)
    with hub:
        builder = load_dataset_builder(dataset.id, dataset.subset, revision=dataset.revision, token=None)
        files = {str(split): list(urls) for split, urls in (builder.config.data_files or {}).items()}
        for split in dataset.splits:
            if split not in files:
                raise ValueError(f"no split {split}; it has {', '.join(files) or 'no files by split'}")
        copies = {
            split: [_Copy(url, _key(dataset, url), hub, store, log) for url in files[split]]
            for split in dataset.splits
        }
    return [
        Shard(f"{split} {number}/{len(copies[split])}", _rows_of(copy, split, scratch))
        for split in dataset.splits
        for number, copy in enumerate(copies[split], 1)
    ]


def _key(dataset: Any, url: str) -> str:
    _, pinned, file = url.partition(f"@{dataset.revision}/")
    if not pinned:
        raise ValueError(f"{url} is no file of this revision; nothing pins it")
    if Path(file).suffix not in (".parquet", ".jsonl", ".json"):
        raise ValueError(f"{file}: parquet and JSON lines are read")
    return f"{FOLDER}/{dataset.id}/{dataset.revision}/{file}"


def _rows_of(copy: "_Copy", split: str, scratch: Path) -> Callable[[int], Iterator[Row]]:
    def rows(start: int) -> Iterator[Row]:
        path = scratch / Path(copy.key).name
        copy.fetch(path)
        (shard,) = of_files([path])
        for row in shard.rows(start):
            yield {**row, "category": split}
        path.unlink()

    return rows


@dataclass(frozen=True)
class _Copy:
    """A file at ``url`` of the hub, and ``key``, the folder of its copy in the store."""

    url: str
    key: str
    hub: "Hub"
    store: Store
    log: Log

    def fetch(self, path: Path) -> None:
        """Bring the file to ``path``; when the store has no copy, from the hub, and then make one."""
        while not self._stored(path):
            lease = Lease(self.store, f"{self.key}/{LEASE}")
            if not lease.acquire(lambda: self._index() is not None, self._waiting):
                continue
            try:
                if self._index() is None:
                    self._download(path)
                    return
            finally:
                lease.release()

    def _stored(self, path: Path) -> bool:
        if (index := self._index()) is None:
            return False
        if self.store.size(f"{self.key}/bytes") == index["size"]:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                self.store.download(f"{self.key}/bytes", path)
                if file_sha256(path) == index["sha256"]:
                    return True
        self.store.delete(f"{self.key}/index.json")  # damaged: copied anew
        return False

    def _index(self) -> dict[str, Any] | None:
        try:
            index = json.loads(self.store.read(f"{self.key}/index.json") or b"")
            return {"size": index["size"], "sha256": index["sha256"]}
        except (ValueError, KeyError, TypeError):
            return None

    def _download(self, path: Path) -> None:
        from fsspec.core import url_to_fs

        self.log.event("copying", url=self.url)
        with self.hub, path.open("wb") as file:
            hub, name = url_to_fs(self.url)
            hub.get_file(name, outfile=file)  # as a stream: a file's own name would let Xet's client hold chunks
        self.store.upload(path, f"{self.key}/bytes")
        index = {"url": self.url, "size": path.stat().st_size, "sha256": file_sha256(path)}
        self.store.write(f"{self.key}/index.json", json.dumps(index).encode())

    def _waiting(self, holder: dict[str, Any]) -> None:
        self.log.event("waiting", why=f"another draw copies {self.url}", host=holder["host"], pid=holder["pid"])


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
        from huggingface_hub.errors import EntryNotFoundError, GatedRepoError

        if error is None or (isinstance(error, OSError) and of_machine(error)):
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
        if isinstance(error, ValueError | EntryNotFoundError):
            raise UserError(f"{self._place}: {said}") from error
        if isinstance(error, OSError | httpx2.HTTPError):
            raise TransientError(f"{self._place}: the hub does not answer ({said}); try again") from error
