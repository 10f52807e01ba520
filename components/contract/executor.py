"""What a stage hands to Kubeflow Pipelines: its executor output, and the files that KFP's launcher uploads.

The output ``artifact`` is a copy of the committed manifest. A stage with a ``PAGE`` has two more: ``page``, a copy of
that file, and ``metrics``, the stage's metric ``figures``; KFP's UI shows both.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from components.contract.stage import Stage
from components.store import cache
from components.store.artifact import Artifact


def write(path: str, outputs: Iterable[tuple[str, str, str]], module: Stage, artifact: Artifact) -> None:
    """Write KFP's ``executor_output.json`` to ``path`` and every output's content to its place.

    ``outputs`` holds name, place and address of each. It keeps the address that KFP gave it, so that the launcher
    uploads it there; where the artifact lies in the store is metadata.
    """
    document: dict[str, Any] = {}
    for name, place, uri in outputs:
        content, metadata = _output(name, module, artifact)
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        Path(place).write_bytes(content)
        document[name] = {"artifacts": [{"name": name, "uri": uri, "metadata": metadata}]}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"artifacts": document}))


def _output(name: str, module: Stage, artifact: Artifact) -> tuple[bytes, dict[str, Any]]:
    """Return content and metadata of an output."""
    if name == "metrics":
        figures = artifact.metrics["figures"]
        return _json(figures), figures
    metadata = {"digest": artifact.digest, "uri": artifact.uri, "stage": artifact.stage}
    if name == "artifact":
        return _json(artifact.manifest), metadata
    page = getattr(module, "PAGE", None)
    assert page, f"{artifact.stage} has no output {name}"
    address = artifact.store.uri(artifact.key(page))
    return cache.fetch_file(artifact, page).read_bytes(), {**metadata, "uri": address}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()
