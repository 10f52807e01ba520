"""Committed artifacts: many files under an attempt, one manifest that makes them an artifact.

Layout: ``<stage>/<digest>/<attempt>/<file>`` and ``<stage>/<digest>/_manifest.json``. The manifest is put last, only
when there is none; without it there is no artifact. A second writer of the same digest adopts the winner's manifest
and removes its own attempt.
"""

import json
import math
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from components.contract.digest import file_sha256
from components.contract.errors import UserError
from components.store.backend import Store

MANIFEST = "_manifest.json"


@dataclass(frozen=True)
class Artifact:
    """One committed artifact: where it is and what its manifest says."""

    store: Store
    stage: str
    digest: str
    manifest: dict[str, Any]

    @property
    def uri(self) -> str:
        """``<store>/<stage>/<digest>``."""
        return self.store.uri(f"{self.stage}/{self.digest}")

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics that the stage returned."""
        return self.manifest["metrics"]

    @property
    def files(self) -> list[dict[str, Any]]:
        """``[{path, size, sha256}]``, sorted by path."""
        return self.manifest["files"]

    def key(self, path: str) -> str:
        """Return the store key of one of the artifact's files."""
        return f"{self.stage}/{self.digest}/{self.manifest['attempt']}/{path}"


def read_manifest(store: Store, stage: str, digest: str) -> Artifact | None:
    """Return the committed artifact, or None when nothing is committed under that digest."""
    data = store.read(f"{stage}/{digest}/{MANIFEST}")
    if data is None:
        return None
    try:
        manifest = json.loads(data)
        names = [manifest["attempt"], *(entry["path"] for entry in manifest["files"])]
        if not manifest["files"] or not isinstance(manifest["metrics"], dict):
            raise ValueError("not what commit writes")
        if not all(isinstance(entry["size"], int) and isinstance(entry["sha256"], str) for entry in manifest["files"]):
            raise ValueError("a file without size or digest")
        if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in names):
            raise ValueError("leaves its folder")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"artifact {store.uri(f'{stage}/{digest}')}: its manifest is not readable; remove it "
            f"(qdflash artifacts rm {stage}/{digest}) and run again"
        ) from error
    return Artifact(store, stage, digest, manifest)


def beginning_with(store: Store, stage: str, start: str) -> list[Artifact]:
    """Return the committed artifacts of ``stage`` whose digest begins with ``start``."""
    found = (read_manifest(store, stage, digest) for digest in store.folders(stage) if digest.startswith(start))
    return [artifact for artifact in found if artifact]


def split_uri(uri: str) -> tuple[str, str, str]:
    """Split ``<store>/<stage>/<digest>`` into its three parts."""
    parts = uri.rstrip("/").rsplit("/", 2)
    if len(parts) != 3 or len(parts[2]) != 64:
        raise UserError(f"{uri}: not an artifact address (<store>/<stage>/<digest>)")
    return parts[0], parts[1], parts[2]


def remove(store: Store, stage: str, digest: str) -> None:
    """Remove an artifact: first its manifest, so that no reader finds one without its files."""
    store.delete(f"{stage}/{digest}/{MANIFEST}")
    store.delete(f"{stage}/{digest}")


def commit(
    store: Store, stage: str, digest: str, folder: Path, manifest: dict[str, Any], replace: bool = False
) -> tuple[Artifact, bool]:
    """Upload ``folder`` as a new attempt and commit it.

    Returns the artifact under ``digest`` and whether it is this attempt (False: another writer was first, its
    artifact is returned and this attempt is removed). ``replace`` is for stages that are never memoised: the new
    manifest takes the place of an earlier one, whose attempt is then removed.
    Raises :class:`UserError` when ``folder`` has no file, or the manifest a number that JSON cannot hold.
    """
    attempt = uuid.uuid4().hex[:12]
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if not paths:
        raise UserError(f"stage {stage} wrote no file; nothing to commit")
    if faults := list(_not_finite(manifest)):
        raise UserError(f"stage {stage}: {faults[0]} is not a finite number; its inputs or its config are at fault")
    base = f"{stage}/{digest}"
    files = []
    for path in paths:
        name = path.relative_to(folder).as_posix()
        store.upload(path, f"{base}/{attempt}/{name}")
        files.append({"path": name, "size": path.stat().st_size, "sha256": file_sha256(path)})
    document = {"stage": stage, "digest": digest, "attempt": attempt, "files": files, **manifest}
    data = json.dumps(document, indent=1, sort_keys=True, allow_nan=False).encode()
    previous = read_manifest(store, stage, digest) if replace else None
    if previous:
        store.write(f"{base}/{MANIFEST}", data)
        store.delete(f"{base}/{previous.manifest['attempt']}")
    elif not store.create(f"{base}/{MANIFEST}", data):
        store.delete(f"{base}/{attempt}")
    artifact = read_manifest(store, stage, digest)
    if artifact is None:
        raise UserError(f"artifact {store.uri(base)} was removed while it was committed; run again")
    return artifact, artifact.manifest["attempt"] == attempt


def _not_finite(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, one in items:
        yield from _not_finite(one, f"{path}.{key}".lstrip("."))


def verify(artifact: Artifact, scratch: Path) -> list[str]:
    """Read every file back; return one line per file that is missing, short or altered."""
    faults = []
    for entry in artifact.files:
        key = artifact.key(entry["path"])
        size = artifact.store.size(key)
        if size is None:
            faults.append(f"{artifact.store.uri(key)}: missing")
            continue
        if size != entry["size"]:
            faults.append(f"{artifact.store.uri(key)}: {size} bytes, the manifest says {entry['size']}")
            continue
        local = scratch / "verify"
        artifact.store.download(key, local)
        if file_sha256(local) != entry["sha256"]:
            faults.append(f"{artifact.store.uri(key)}: sha256 differs from the manifest's")
        local.unlink()
    return faults
