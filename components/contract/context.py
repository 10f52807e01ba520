"""What a stage's ``run`` is given: its inputs, and the place for its output."""

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from components.contract.digest import file_sha256
from components.contract.errors import UserError
from components.contract.log import Log
from components.store import cache
from components.store.artifact import Artifact, read_manifest, split_uri
from components.store.backend import Store
from components.store.work import Work

FILES = "_files"
_STORED = re.compile(rf".*/{FILES}/[0-9a-f]{{64}}/[^/]+", re.DOTALL)


def is_stored_file(uri: str) -> bool:
    """Say whether an address is ``<store>/_files/<sha256>/<name>``; a store's own folders may be called anything."""
    return _STORED.fullmatch(uri) is not None


@dataclass(frozen=True)
class Input:
    """One artifact, or one plain file in the store's ``_files`` area or on this machine.

    ``digest`` is known from the address alone; ``path`` fetches and verifies on first use.
    """

    uri: str

    @cached_property
    def digest(self) -> str:
        """The artifact's digest, or the sha256 of a plain file."""
        if is_stored_file(self.uri):
            return self.uri.rsplit("/", 2)[1]
        if self._is_local_file:
            return file_sha256(Path(self.uri))
        if not urlsplit(self.uri).scheme and not Path(self.uri).exists() and len(self.uri.rsplit("/", 1)[-1]) != 64:
            raise UserError(f"input {self.uri}: no such file")
        return split_uri(self.uri)[2]

    @cached_property
    def path(self) -> Path:
        """A local, verified, read-only copy: a folder for an artifact, a file for a plain file."""
        if self._is_local_file:
            return Path(self.uri)
        if is_stored_file(self.uri):
            return self._fetch_file()
        return cache.fetch(self.artifact)

    def file(self, path: str) -> Path:
        """A local, verified copy of one of the artifact's files; its name is not kept."""
        return cache.fetch_file(self.artifact, path)

    @cached_property
    def artifact(self) -> Artifact:
        """The committed artifact with its manifest."""
        store, stage, digest = split_uri(self.uri)
        artifact = read_manifest(Store(store), stage, digest)
        if artifact is None:
            raise UserError(f"input {self.uri}: nothing is committed there; run the {stage} stage first")
        return artifact

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the stage that made this artifact."""
        return self.artifact.metrics

    @property
    def _is_local_file(self) -> bool:
        return not is_stored_file(self.uri) and not urlsplit(self.uri).scheme and Path(self.uri).is_file()

    def _fetch_file(self) -> Path:
        base, _, rest = self.uri.rpartition(f"/{FILES}/")
        sha256, name = rest.split("/", 1)
        local = cache.home() / "cache" / "files" / sha256 / name
        if not local.exists() or file_sha256(local) != sha256:
            partial = local.with_name(f".{name}-{uuid.uuid4().hex[:8]}")
            try:
                Store(base).download(f"{FILES}/{rest}", partial)
                if file_sha256(partial) != sha256:
                    raise UserError(f"input {self.uri}: its bytes are not those its address names; upload it again")
                partial.replace(local)
            finally:
                partial.unlink(missing_ok=True)
        return local


@dataclass
class Inputs:
    """The stage's bound ports. ``inputs["model"]`` is one :class:`Input`; ``many`` ports use :meth:`all`."""

    bound: dict[str, list[Input]]

    def __getitem__(self, port: str) -> Input:
        return self.bound[port][0]

    def __contains__(self, port: str) -> bool:
        return bool(self.bound.get(port))

    def all(self, port: str) -> list[Input]:
        """Every input bound to ``port``, in the order given; empty when none is."""
        return self.bound.get(port, [])

    def digests(self) -> dict[str, list[str]]:
        """Port to digests, as they enter the stage's own digest."""
        return {port: [one.digest for one in many] for port, many in self.bound.items() if many}


@dataclass
class Output:
    """Where a stage writes: ``path`` is committed when ``run`` returns, ``work`` survives a kill.

    ``scratch`` is a local folder that is removed at the end, whatever happens.
    """

    path: Path
    scratch: Path
    work: Work
    log: Log
    _seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Record the wall-clock seconds of a phase; they go into the manifest under ``phases``."""
        import time

        start = time.monotonic()
        self.log.event("phase", name=phase)
        try:
            yield
        finally:
            self._seconds[phase] = round(time.monotonic() - start, 3)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase."""
        return dict(self._seconds)
