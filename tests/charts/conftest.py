"""The chart, rendered by Helm itself without a cluster, with the values that the deploy stage writes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from components.deploy.values import values
from components.serving.profiles import A10G, Serving
from components.store.artifact import Artifact
from components.store.backend import Store
from pipelines.deployment.chart import over as merged

CHART = Path(__file__).parents[2] / "charts" / "qdflash"
IMAGE = f"registry.example/qdflash-vllm@sha256:{'b' * 64}"
SUMS = "c" * 64
PAIR = Serving(served_model_name="pair", profiles={"a10g": A10G.model_copy(update={"num_speculative_tokens": 15})})

Objects = dict[str, dict[str, Any]]
Render = Callable[..., Objects]


@pytest.fixture(scope="session")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The deploy stage's own values, as they come back from its file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        files = [{"path": "SHA256SUMS", "size": 1, "sha256": SUMS}]
        bundle = Artifact(Store("s3://bucket/runs"), "bundle", "a" * 64, {"attempt": "0123456789ab", "files": files})
        written = yaml.safe_dump(values(bundle, PAIR, "a10g", IMAGE, acceptance_floor=3.0))
    return yaml.safe_load(written)


@pytest.fixture(scope="session")
def render(given: dict[str, Any]) -> Render:
    """Return objects by kind for the given values with ``changes`` merged in; no kind comes twice."""
    chart = helm_python.Chart.load(CHART)

    def rendered(changes: dict[str, Any] | None = None, name: str = "pair") -> Objects:
        files = chart.render(merged(given, changes or {}), name=name, namespace="serving")
        objects = [yaml.load(text, yaml.CSafeLoader) for path, text in files.items() if path.endswith(".yaml")]
        found = [one for one in objects if one]
        assert len({one["kind"] for one in found}) == len(found)
        return {one["kind"]: one for one in found}

    return rendered
