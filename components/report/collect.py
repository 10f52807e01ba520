"""Gather what the page needs from the committed artifacts, fetching only their small files and headers."""

import json
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from components.checkpoint.step_bytes import (
    LENGTH_BYTES,
    Model,
    header_length,
    model_of,
    parse_header,
    step_bytes,
)
from components.contract.context import Input
from components.serving.profiles import DRAFT_FOLDER
from components.store.artifact import Artifact


@dataclass(frozen=True)
class TaskRecord:
    """One task of the run as its manifest tells it, with the small files that the page draws from."""

    name: str
    stage: str
    digest: str
    uri: str
    seconds: float
    config: dict[str, Any]
    metrics: dict[str, Any]
    versions: dict[str, str]
    inputs: dict[str, list[str]]
    started: float | None = None
    curve: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    timed: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    served: tuple[Model, Model | None] | None = None

    @classmethod
    def of(cls, name: str, artifact: Artifact, **drawn_from: Any) -> "TaskRecord":
        """Return the record of a task's artifact; ``drawn_from`` are the fields that are not in its manifest."""
        keys = ("stage", "digest", "seconds", "config", "metrics", "versions", "inputs")
        told = {key: artifact.manifest[key] for key in keys}
        return cls(name=name, uri=artifact.uri, **told, started=artifact.manifest.get("started"), **drawn_from)

    def get(self, path: str) -> Any:
        """Return the metric at ``key.key``, or None."""
        value: Any = self.metrics
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                return None
            value = value[key]
        return value

    @property
    def step_bytes(self) -> dict[str, int]:
        """Bytes by part of a decoding step of what was measured, at the end of its longest latency request."""
        if self.served is None:
            return {}
        regimes = self.config.get("latency", {}).values()
        context = max((regime["input_tokens"] + regime["output_tokens"] for regime in regimes), default=0)
        target, drafter = self.served
        return step_bytes(target, context, drafter)


def collect(inputs: dict[str, Input]) -> dict[str, TaskRecord]:
    """Read every input's manifest, its ``curve.jsonl`` and ``samples.jsonl``, and the headers of what was served."""
    tasks = {}
    for name, one in inputs.items():
        manifest = one.artifact.manifest
        tasks[name] = TaskRecord.of(
            name,
            one.artifact,
            curve=_lines(one, "curve.jsonl"),
            samples=_lines(one, "samples.jsonl"),
            timed=_timed(one),
            served=_served(manifest) if manifest["stage"] == "measure" else None,
        )
    return tasks


def _lines(one: Input, name: str) -> list[dict[str, Any]]:
    if not any(entry["path"] == name for entry in one.artifact.files):
        return []
    return [json.loads(line) for line in one.file(name).read_text(encoding="utf-8").split("\n") if line]


def _timed(one: Input) -> dict[str, list[dict[str, Any]]]:
    """Return the timed requests of a measurement by regime, where they went out one at a time."""
    name = "latency.json"
    if not any(entry["path"] == name for entry in one.artifact.files):
        return {}
    asked = one.artifact.manifest["config"]["latency"]
    found = json.loads(one.file(name).read_text(encoding="utf-8"))
    return {regime: timed["samples"] for regime, timed in found.items() if asked[regime]["concurrency"] == 1}


def _served(manifest: dict[str, Any]) -> tuple[Model, Model | None] | None:
    """Return the target and the drafter that were measured; None without a model input."""
    served = [Input(uri) for uri in manifest["inputs"].get("model", [])]
    if not served:
        return None
    drafter = _model(served[0], DRAFT_FOLDER) if manifest["config"].get("draft") else None
    return _model(served[0], "."), drafter


def _model(served: Input, folder: str) -> Model:
    """Read a model of an artifact by its config and the headers of its tensors, not the tensors."""
    artifact = served.artifact
    table: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in (PurePosixPath(entry["path"]) for entry in artifact.files):
        if path.parent == PurePosixPath(folder) and path.suffix == ".safetensors":
            key = artifact.key(str(path))
            length = header_length(artifact.store.read(key, first=LENGTH_BYTES) or b"")
            header = artifact.store.read(key, first=LENGTH_BYTES + length) or b""
            table |= parse_header(header[LENGTH_BYTES:], artifact.store.uri(key))
    config = json.loads(served.file(str(PurePosixPath(folder) / "config.json")).read_text(encoding="utf-8"))
    return model_of(table, config)
