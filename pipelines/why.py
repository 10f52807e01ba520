"""Why a task runs: what differs from the committed artifact of its stage that comes nearest."""

import json
from typing import Any

from pydantic import BaseModel

from components.contract.digest import digested
from components.store.artifact import read_manifest
from components.store.backend import Store

_SHOWN = 3


class History:
    """The committed manifests of a store, read once per stage.

    ``current`` are the digests of the recipe's own tasks: what another task of it is says nothing about this one.
    """

    def __init__(self, store: Store, current: set[str]) -> None:
        self._store = store
        self._current = current
        self._manifests: dict[str, list[dict[str, Any]]] = {}

    def explain(
        self,
        stage: str,
        version: int,
        config: BaseModel,
        inputs: dict[str, list[str]],
        salt: str | None,
        running: dict[str, str],
    ) -> str:
        """Say in one line why ``stage`` has to run.

        Compares with the committed artifact that differs in the fewest places, the newest of equals. ``running``
        maps the address of each input that is itself about to be made to the task that makes it.
        """
        manifests = self._of(stage)
        if not manifests:
            return "never run"
        compared = [_differences(manifest, version, config, inputs, salt, running) for manifest in manifests]
        nearest = min(compared, key=len)
        return listed(list(dict.fromkeys(nearest)) or ["its digest changed"])

    def _of(self, stage: str) -> list[dict[str, Any]]:
        """Return the stage's manifests, newest first."""
        if stage not in self._manifests:
            digests = [digest for digest in self._store.folders(stage) if digest not in self._current]
            found = (read_manifest(self._store, stage, digest) for digest in digests)
            manifests = [artifact.manifest for artifact in found if artifact]
            self._manifests[stage] = sorted(manifests, key=lambda manifest: -manifest["started"])
        return self._manifests[stage]


def _differences(
    manifest: dict[str, Any],
    version: int,
    config: BaseModel,
    inputs: dict[str, list[str]],
    salt: str | None,
    running: dict[str, str],
) -> list[str]:
    """Return one phrase for each place where a task differs from a committed artifact."""
    phrases = []
    if salt != manifest["salt"]:
        phrases.append("forced" if salt else "no longer forced")
    if version != manifest["version"]:
        phrases.append(f"version {manifest['version']} -> {version}")
    new = flat(digested(config))
    runtime = flat(config.model_dump(mode="json")).keys() - new.keys()
    old = {path: value for path, value in flat(manifest["config"]).items() if path not in runtime}
    for path in sorted(new.keys() | old.keys()):
        if new.get(path) != old.get(path):
            phrases.append(f"{path} {short(old.get(path))} -> {short(new.get(path))}")
    for port in sorted(inputs.keys() | manifest["inputs"].keys()):
        uris, before = inputs.get(port, []), manifest["inputs"].get(port, [])
        if [_identity(uri) for uri in uris] == [_identity(uri) for uri in before]:
            continue
        makers = dict.fromkeys(running[uri] for uri in uris if uri in running)
        phrases.extend(f"below {maker}" for maker in makers)
        if not makers:
            phrases.append(f"input {port} {_names(before)} -> {_names(uris)}")
    return phrases


def _identity(uri: str) -> str:
    """Return the digest in an address: a plain file's is the folder above its name."""
    parts = uri.rsplit("/", 2)
    return parts[1] if len(parts[1]) == 64 else parts[2]


def _names(uris: list[str]) -> str:
    return "+".join(_identity(uri)[:8] for uri in uris) or "none"


def listed(phrases: list[str]) -> str:
    """Return the first few of some phrases, and how many are left."""
    more = f", {len(phrases) - _SHOWN} more" if len(phrases) > _SHOWN else ""
    return ", ".join(phrases[:_SHOWN]) + more


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Flatten nested mappings into dotted paths; lists stay whole."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    return {
        place: leaf
        for key, inner in value.items()
        for place, leaf in flat(inner, f"{path}.{key}" if path else key).items()
    }


def short(value: Any) -> str:
    """Return a value as JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "…"
