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
import uuid
from pathlib import Path

from components.contract.digest import file_sha256
from components.contract.errors import UserError
from components.store.artifact import Artifact


def home() -> Path:
    """The state folder: ``QDFLASH_HOME``, else ``.qdflash`` in the current folder."""
    return Path(os.environ.get("QDFLASH_HOME", ".qdflash")).absolute()


def fetch(artifact: Artifact) -> Path:
    """Return a local folder with the artifact's files, downloaded and verified where not cached yet.

    Raises :class:`UserError` naming the file when the store's bytes are not those of the manifest.
    """
    root = home() / "cache"
    name = hashlib.sha256(json.dumps(artifact.manifest, sort_keys=True).encode()).hexdigest()
    view = root / "views" / name
    _hold(root, name)
    if view.exists():
        os.utime(view)
        return view
    _make_room(root, sum(entry["size"] for entry in artifact.files))
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
        with contextlib.suppress(OSError):
            blobs.mkdir(parents=True, exist_ok=True)
            (folder / entry["path"]).chmod(0o444)
            os.link(folder / entry["path"], blobs / entry["sha256"])


def fetch_file(artifact: Artifact, path: str) -> Path:
    """Return a local, verified copy of one of the artifact's files, without fetching the others."""
    for entry in artifact.files:
        if entry["path"] == path:
            root = home() / "cache"
            _make_room(root, entry["size"])
            return _blob(root, artifact, entry)
    raise UserError(f"artifact {artifact.uri}: has no file {path}")


def _hold(root: Path, name: str) -> None:
    """Keep a view from being evicted for as long as this process lives."""
    path = root / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def _is_held(root: Path, name: str) -> bool:
    path = root / "locks" / name
    try:
        with path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _link(root: Path, artifact: Artifact, entry: dict, target: Path) -> None:
    try:
        os.link(_blob(root, artifact, entry), target)
    except FileNotFoundError:  # evicted by another process between its download and this link
        os.link(_blob(root, artifact, entry), target)


def _blob(root: Path, artifact: Artifact, entry: dict) -> Path:
    blob = root / "blobs" / entry["sha256"]
    if blob.exists() and blob.stat().st_size == entry["size"]:
        return blob
    key = artifact.key(entry["path"])
    temporary = blob.with_name(f".{blob.name}-{uuid.uuid4().hex[:8]}")
    try:
        if artifact.store.size(key) is None:
            raise UserError(f"artifact {artifact.uri}: file {entry['path']} is missing from the store; {_REMEDY}")
        artifact.store.download(key, temporary)
        if temporary.stat().st_size != entry["size"] or file_sha256(temporary) != entry["sha256"]:
            raise UserError(f"artifact {artifact.uri}: file {entry['path']} is corrupted (sha256 differs); {_REMEDY}")
        temporary.chmod(0o444)
        os.replace(temporary, blob)
    finally:
        temporary.unlink(missing_ok=True)
    return blob


_REMEDY = "see qdflash artifacts verify, then remove it (qdflash artifacts rm) and run again"


def _make_room(root: Path, incoming: int) -> None:
    limit = float(os.environ.get("QDFLASH_CACHE_GB", "200")) * 1e9
    blobs = root / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    (root / "views").mkdir(exist_ok=True)
    held = sum(status.st_size for _, status in _listing(blobs))
    views = sorted(_listing(root / "views"), key=lambda entry: entry[1].st_mtime)
    for view, _ in views:
        if held + incoming <= limit:
            break
        if _is_held(root, view.name):
            continue
        shutil.rmtree(view, ignore_errors=True)
        for blob, status in _listing(blobs):
            if status.st_nlink == 1:
                blob.unlink(missing_ok=True)
                held -= status.st_size


def _listing(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """List a folder that other processes change: what is gone before it is looked at is left out."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append((path, path.stat()))
    return found
