"""What lies in the store: list, find, export, and clean up."""

import itertools
import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.contract.errors import UserError, of_machine, one_line
from components.contract.stage import STAGES
from components.prompts import hub
from components.store import cache
from components.store.artifact import MANIFEST, Artifact, beginning_with, read_manifest, split_uri
from components.store.backend import Store
from components.store.lease import TTL_SECONDS, is_dead
from pipelines.interpreters import environment, interpreter
from pipelines.lineage import Lineage

LEASE = "_lease.json"
_NEVER = "no manifest: never committed"


@dataclass(frozen=True)
class Garbage:
    """One thing that can go: ``key`` in the store, and why."""

    key: str
    why: str


def every(store: Store, stage: str | None = None) -> Iterator[Artifact]:
    """Yield every committed artifact, of one stage or of all, newest first within a stage."""
    if stage is not None and stage not in STAGES:
        raise UserError(f"stage {stage}: unknown; stages are {', '.join(STAGES)}")
    for name in [stage] if stage else STAGES:
        found = (read_manifest(store, name, digest) for digest in store.folders(name))
        yield from sorted(filter(None, found), key=lambda one: -one.manifest["started"])


def find(store: Store, text: str) -> Artifact:
    """Return the artifact that ``text`` names: an address, ``stage/digest``, or the beginning of a digest.

    Raises :class:`UserError` when there is none, or more than one.
    """
    if "://" in text or text.startswith(("/", ".")):
        url, stage, digest = split_uri(text)
        artifact = read_manifest(Store(url), stage, digest)
        if artifact is None:
            raise UserError(f"artifact {text}: nothing is committed there")
        return artifact
    stage, _, digest = text.rpartition("/")
    stages = ([stage] if stage else STAGES) if digest else ()
    found = [artifact for name in stages for artifact in beginning_with(store, name, digest)]
    if len(found) != 1:
        many = f"{len(found)} artifacts begin so; give more digits" if found else "no such artifact"
        raise UserError(f"artifact {text}: {many} (qdflash artifacts list)")
    return found[0]


def locate(text: str, connect: Callable[[], Store]) -> tuple[Store, str, str]:
    """Return where ``text`` points, whether or not its manifest can be read: a damaged one has to be removable."""
    if "://" in text or text.startswith(("/", ".")):
        url, stage, digest = split_uri(text)
        store = Store(url)
    else:
        store, (stage, _, digest) = connect(), text.rpartition("/")
    if stage in STAGES and len(digest) == 64 and store.size(f"{stage}/{digest}/{MANIFEST}") is not None:
        return store, stage, digest
    found = find(store, text)
    return found.store, found.stage, found.digest


def rows(store: Store, stage: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield what ``artifacts list`` shows of each artifact; ``apart`` tells it from the others of its stage."""
    lineage = Lineage()
    for name, group in itertools.groupby(every(store, stage), key=lambda one: one.stage):
        found = list(group)
        for artifact, apart in zip(found, lineage.apart(found), strict=True):
            ended = artifact.manifest["started"] + artifact.manifest["seconds"]
            yield {
                "stage": name,
                "digest": artifact.digest,
                "committed": time.strftime("%Y-%m-%d %H:%M", time.localtime(ended)),
                "seconds": artifact.manifest["seconds"],
                "files": len(artifact.files),
                "bytes": sum(entry["size"] for entry in artifact.files),
                "uri": artifact.uri,
                "apart": apart,
            }


def export(artifact: Artifact, folder: Path, dense: bool = False) -> list[str]:
    """Copy an artifact's verified files into ``folder``, whole or not at all; it must not exist or be empty.

    ``dense`` writes a W4A16 model's BF16 twin instead; tensors are the train role's work.

    Returns:
        What else lies in the artifact, by its topmost names: what is about the packed model, and a bundle's drafter.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not an empty folder; choose another")
    source = cache.fetch(artifact)
    folder = folder.absolute()
    building = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        building.parent.mkdir(parents=True, exist_ok=True)
        if dense:
            argv = [interpreter("train"), "-m", "components.checkpoint", str(source), str(building)]
            done = subprocess.run(
                argv, env=environment("pack", os.cpu_count() or 1), stderr=subprocess.PIPE, text=True
            )
            if done.returncode:
                raise UserError(f"{artifact.uri}: not unpacked: {done.stderr.strip().rpartition(chr(10))[2]}")
        else:
            shutil.copytree(source, building, copy_function=shutil.copyfile)
        building.replace(folder)
    except OSError as error:
        raise UserError(f"{folder}: not written: {of_machine(error) or one_line(error, 200)}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    left = {path.name for path in source.iterdir()} - {path.name for path in folder.iterdir()}
    return sorted(name + "/" * (source / name).is_dir() for name in left if ".safetensors" not in name)


def garbage(store: Store, keep: Iterable[str] = (), datasets: bool = False) -> list[Garbage]:
    """Return what can go: attempts without a manifest and work of committed artifacts.

    When ``keep`` names digests, also artifacts and work that neither are among them nor were read to make one of
    them; with ``datasets`` also copies of hub data sets. What is under a live lease stays.
    """
    kept, found = _reachable(store, set(keep)), list(_copies(store)) if datasets else []
    for stage in STAGES:
        for digest in store.folders(stage):
            base = f"{stage}/{digest}"
            if _is_worked_on(store, stage, digest):
                continue
            artifact = read_manifest(store, stage, digest)  # after the lease: its holder may just have committed
            if artifact is None:
                found.append(Garbage(base, _NEVER))
            elif kept and digest not in kept:
                found.append(Garbage(base, "no kept recipe reaches it"))
            else:
                others = [one for one in store.folders(base) if one != artifact.manifest["attempt"]]
                found += [Garbage(f"{base}/{one}", "an attempt that was not committed") for one in others]
    for stage in store.folders("_work"):
        for digest in store.folders(f"_work/{stage}"):
            base = f"_work/{stage}/{digest}"
            if _is_worked_on(store, stage, digest) or not store.keys(base):  # some stores keep empty folders
                continue
            if read_manifest(store, stage, digest):
                found.append(Garbage(base, "work of a committed artifact"))
            elif kept and digest not in kept:
                found.append(Garbage(base, "work that no kept recipe would continue"))
    return found


def remove_garbage(store: Store, found: Iterable[Garbage]) -> None:
    """Delete what :func:`garbage` found; a manifest goes before the files it names."""
    for one in found:
        stage, _, digest = one.key.partition("/")
        if one.why == _NEVER and (
            store.size(f"{one.key}/{MANIFEST}") or store.size(f"_work/{stage}/{digest}/{LEASE}")
        ):
            continue  # committed, or begun, since it was listed
        store.delete(f"{one.key}/{MANIFEST}")
        store.delete(one.key)


def _copies(store: Store) -> Iterator[Garbage]:
    """Yield the copies of hub data sets, one a revision, that no draw is making."""
    for owner in store.folders(hub.FOLDER):
        for name in store.folders(f"{hub.FOLDER}/{owner}"):
            for revision in store.folders(f"{hub.FOLDER}/{owner}/{name}"):
                keys = store.keys(base := f"{hub.FOLDER}/{owner}/{name}/{revision}")
                if keys and not any(_is_held(store, key) for key in keys if key.endswith(f"/{hub.LEASE}")):
                    yield Garbage(base, "copy of a hub data set: the next draw that reads it copies it again")


def _is_worked_on(store: Store, stage: str, digest: str) -> bool:
    return _is_held(store, f"_work/{stage}/{digest}/{LEASE}")


def _is_held(store: Store, key: str) -> bool:
    """Say whether a lease is held: its process lives, or its heartbeat moves within the lease's time to live."""
    data = store.read(key)
    if data is None or is_dead(data):
        return False
    end = time.monotonic() + TTL_SECONDS
    while time.monotonic() < end:
        time.sleep(1.0)
        now = store.read(key)
        if now != data:
            return now is not None
    return False


def _reachable(store: Store, digests: set[str]) -> set[str]:
    reached: set[str] = set()
    manifests = {artifact.digest: artifact for artifact in every(store)} if digests else {}
    pending = set(digests)
    while pending:
        digest = pending.pop()
        reached.add(digest)
        if digest in manifests:
            inputs = [uri for uris in manifests[digest].manifest["inputs"].values() for uri in uris]
            pending |= {uri.rsplit("/", 1)[-1] for uri in inputs} - reached
    return reached


def as_json(value: Any) -> str:
    """Return ``value`` as the JSON that ``--json`` prints."""
    return json.dumps(value, indent=1, sort_keys=True)
