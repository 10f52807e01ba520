"""Gather what the page needs from the committed artifacts, fetching only their small files."""

import json
from dataclasses import dataclass
from typing import Any

from components.contract.context import Input


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
    curve: list[dict[str, Any]]
    samples: list[dict[str, Any]]

    def get(self, path: str) -> Any:
        """Return the metric at ``key.key``, or None."""
        value: Any = self.metrics
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                return None
            value = value[key]
        return value


def collect(inputs: dict[str, Input]) -> dict[str, TaskRecord]:
    """Read every input's manifest, its ``curve.jsonl`` and its ``samples.jsonl`` where it has them."""
    tasks = {}
    for name, one in inputs.items():
        manifest = one.artifact.manifest
        tasks[name] = TaskRecord(
            name=name,
            stage=manifest["stage"],
            digest=manifest["digest"],
            uri=one.artifact.uri,
            seconds=manifest["seconds"],
            config=manifest["config"],
            metrics=manifest["metrics"],
            versions=manifest["versions"],
            inputs=manifest["inputs"],
            curve=_lines(one, "curve.jsonl"),
            samples=_lines(one, "samples.jsonl"),
        )
    return tasks


def _lines(one: Input, name: str) -> list[dict[str, Any]]:
    if not any(entry["path"] == name for entry in one.artifact.files):
        return []
    return [json.loads(line) for line in one.file(name).read_text(encoding="utf-8").splitlines() if line]
