"""Local, verified copies of artifacts, fetched once and memory-mapped from there.

``<home>/cache/blobs/<sha256>`` holds each file once; ``<home>/cache/views/<manifest sha256>/`` hard-links them under
the artifact's own names. Oldest views go first when the cache outgrows ``QDFLASH_CACHE_GB`` (default 200).
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from components.contract.digest import file_sha256
from components.contract.errors import TransientError, UserError
from components.store.artifact import Artifact

_SEALED_NS = 10**9
_TRIES = 50
_DOWNLOAD_SECONDS = 3600.0


def home() -> Path:
    """The state folder: ``QDFLASH_HOME``, else ``.qdflash`` in the current folder."""
    return Path(os.environ.get("QDFLASH_HOME") or ".qdflash").absolute()


def fetch(artifact: Artifact) -> Path:
    """Return a local folder with the artifact's files, downloaded and verified where not cached yet.

    Raises :class:`UserError` naming the file when the store's bytes are not those of the manifest.
    """
    root = home() / "cache"
    name = hashlib.sha256(json.dumps(artifact.manifest, sort_keys=True).encode()).hexdigest()
    view = root / "views" / name
    limit = _limit()  # wrong before it is needed, too
    _hold(root, name)
    if view.exists():
        if all(_intact(view / entry["path"], entry) for entry in artifact.files):
            os.utime(view)
            return view
        _discard(view)
    _make_room(root, sum(entry["size"] for entry in artifact.files), limit)
    building = view.with_name(f".{name}-{uuid.uuid4().hex[:8]}")
    try:
        for entry in artifact.files:
            target = building / entry["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(root, artifact, entry, target)
        building.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(building, view)
        except OSError:
            if not view.exists():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return view


def keep(artifact: Artifact, folder: Path) -> None:
    """Keep the files that were just committed from ``folder``, so that the next stage here need not fetch them.

    Only where they are on the cache's file system, since a link costs nothing; ``folder`` must not be written again.
    """
    blobs = home() / "cache" / "blobs"
    for entry in artifact.files:
        with contextlib.suppress(OSError):  # committed already: a damaged or full cache costs a download, no more
            blobs.mkdir(parents=True, exist_ok=True)
            _seal(folder / entry["path"])
            os.link(folder / entry["path"], blobs / entry["sha256"])


def fetch_file(artifact: Artifact, path: str) -> Path:
    """Return a local, verified copy of one of the artifact's files, without fetching the others."""
    for entry in artifact.files:
        if entry["path"] == path:
            root = home() / "cache"
            _hold(root, entry["sha256"])
            _make_room(root, entry["size"], _limit())
            return _blob(root, artifact, entry)
    raise UserError(f"artifact {artifact.uri}: has no file {path}")


def _hold(root: Path, name: str) -> None:
    """Keep a view from being evicted for as long as this process lives."""
    path = root / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)


@contextlib.contextmanager
def _unheld(root: Path, name: str) -> Iterator[bool]:
    """Yield whether no process holds ``name``; none can begin to until the block ends."""
    path = root / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _link(root: Path, artifact: Artifact, entry: dict, target: Path) -> None:
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):  # evicted by another process between its download and this link
            os.link(_blob(root, artifact, entry), target)
            return
    raise TransientError(
        f"cache {root}: {entry['path']} was evicted {_TRIES} times; raise QDFLASH_CACHE_GB or try again"
    )


def _seal(path: Path) -> None:
    """Give a verified file the one modification time that a later write, through whichever link, would change."""
    path.chmod(0o444)
    os.utime(path, ns=(_SEALED_NS, _SEALED_NS))


def _intact(path: Path, entry: dict) -> bool:
    """Say whether a cached file is there, whole, and not written since it was verified."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == entry["size"] and status.st_mtime_ns == _SEALED_NS


def _discard(path: Path) -> None:
    """Take a view or a blob away whole: nobody finds half of it."""
    aside = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink()


def _blob(root: Path, artifact: Artifact, entry: dict) -> Path:
    blob = root / "blobs" / entry["sha256"]
    if _intact(blob, entry):
        return blob
    _discard(blob)
    key = artifact.key(entry["path"])
    temporary = blob.with_name(f".{blob.name}-{uuid.uuid4().hex[:8]}")
    try:
        if artifact.store.size(key) is None:
            raise UserError(f"artifact {artifact.uri}: file {entry['path']} is missing from the store; {_REMEDY}")
        artifact.store.download(key, temporary)
        if temporary.stat().st_size != entry["size"] or file_sha256(temporary) != entry["sha256"]:
            raise UserError(f"artifact {artifact.uri}: file {entry['path']} is corrupted (sha256 differs); {_REMEDY}")
        _seal(temporary)
        os.replace(temporary, blob)
    finally:
        temporary.unlink(missing_ok=True)
    return blob


_REMEDY = "see qdflash artifacts verify, then remove it (qdflash artifacts rm) and run again"


def _make_room(root: Path, incoming: int, limit: float) -> None:
    """Evict blobs that no view has, then views, oldest first, until ``incoming`` bytes fit into ``limit``."""
    blobs = root / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    (root / "views").mkdir(exist_ok=True)
    excess = sum(status.st_size for _, status in _entries(blobs)) + incoming - limit
    if excess > 0:
        excess -= _evict_unused(root)
    for view, _ in sorted(_entries(root / "views"), key=lambda one: one[1].st_mtime):
        if excess <= 0:
            break
        with _unheld(root, view.name.lstrip(".")[:64]) as free:
            if free:
                _discard(view)
        if free:
            excess -= _evict_unused(root)


def _evict_unused(root: Path) -> int:
    """Remove the blobs of no view and what killed downloads left; return how many bytes that freed."""
    freed = 0
    for blob, status in _entries(root / "blobs"):
        if status.st_nlink > 1 or (blob.name.startswith(".") and time.time() - status.st_mtime < _DOWNLOAD_SECONDS):
            continue
        with _unheld(root, blob.name.lstrip(".")[:64]) as free:
            if free:
                blob.unlink(missing_ok=True)
                freed += status.st_size
    return freed


def _entries(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """List a folder that other processes change meanwhile."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append((path, path.stat()))
    return found


def _limit() -> float:
    text = os.environ.get("QDFLASH_CACHE_GB", "200")
    try:
        return float(text) * 1e9
    except ValueError as error:
        raise UserError(f"QDFLASH_CACHE_GB={text}: expected a number of GB") from error
