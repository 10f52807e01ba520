"""Work in progress of one digest: small committed parts that outlive the process that made them.

Parts live under ``_work/<stage>/<digest>/``. A part is one object, or a folder whose index object is put last; either
way it is there whole or not at all.
"""

import json
import shutil
import uuid
from pathlib import Path

from components.contract.digest import file_sha256
from components.store.backend import Store


class Work:
    """Parts by name. Names may hold slashes; ``names(prefix)`` lists them in order."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.store, self.prefix = store, prefix

    def put(self, name: str, data: bytes) -> None:
        """Store a part's bytes, replacing an earlier part of that name."""
        self.store.write(f"{self.prefix}/parts/{name}", data)

    def get(self, name: str) -> bytes | None:
        """Return a part's bytes, or None."""
        return self.store.read(f"{self.prefix}/parts/{name}")

    def delete(self, name: str) -> None:
        """Remove a part; none of that name is no error."""
        self.store.delete(f"{self.prefix}/parts/{name}")

    def names(self, prefix: str = "") -> list[str]:
        """List the parts whose name starts with ``prefix``, sorted."""
        cut = len(f"{self.prefix}/parts/")
        names = [key[cut:] for key in self.store.keys(f"{self.prefix}/parts")]
        return [name for name in names if name.startswith(prefix)]

    def put_folder(self, name: str, folder: Path) -> None:
        """Store a folder of files (a checkpoint); visible only once all of it is there. What fails leaves nothing."""
        copy = f"{self.prefix}/folders/{name.replace('/', '-')}-{uuid.uuid4().hex[:12]}"
        files = []
        try:
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                relative = path.relative_to(folder).as_posix()
                self.store.upload(path, f"{copy}/{relative}")
                files.append({"path": relative, "size": path.stat().st_size, "sha256": file_sha256(path)})
        except Exception:
            self.store.delete(copy)
            raise
        previous = self._index(name)
        self.store.write(self._index_key(name), json.dumps({"copy": copy, "files": files}).encode())
        if previous:
            self.store.delete(previous["copy"])

    def folders(self) -> list[str]:
        """List the names of the whole folders, sorted."""
        cut = len(f"{self.prefix}/index/")
        return [key[cut:-5] for key in self.store.keys(f"{self.prefix}/index")]

    def get_folder(self, name: str, folder: Path) -> bool:
        """Fetch a folder; return False when there is none or its bytes are not what was stored."""
        index = self._index(name)
        if index is None:
            return False
        shutil.rmtree(folder, ignore_errors=True)
        for entry in index["files"]:
            if self.store.size(key := f"{index['copy']}/{entry['path']}") is None:
                return False
            self.store.download(key, folder / entry["path"])
            if file_sha256(folder / entry["path"]) != entry["sha256"]:
                return False
        return True

    def delete_folder(self, name: str) -> None:
        """Remove a folder: first its index, then its files."""
        index = self._index(name)
        if index:
            self.store.delete(self._index_key(name))
            self.store.delete(index["copy"])

    def tidy(self) -> None:
        """Remove what uploads of folders that were killed have left; whoever holds the lease may, before it begins."""
        kept = [f"{index['copy']}/" for name in self.folders() if (index := self._index(name))]
        for left in self.store.folders(copies := f"{self.prefix}/folders"):
            if not any(copy.startswith(f"{copies}/{left}/") for copy in kept):
                self.store.delete(f"{copies}/{left}")

    def clear(self) -> None:
        """Remove everything of this digest's work."""
        self.store.delete(self.prefix)

    def _index_key(self, name: str) -> str:
        return f"{self.prefix}/index/{name}.json"

    def _index(self, name: str) -> dict | None:
        """Return a folder's index, or None when there is none that can be read: its folder is then not there."""
        try:
            index = json.loads(self.store.read(self._index_key(name)) or b"")
            return {"copy": index["copy"], "files": index["files"]}
        except (ValueError, KeyError, TypeError):
            return None
