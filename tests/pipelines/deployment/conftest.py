"""A gated bundle in a real S3 store, a fake cluster, and a stand-in for vLLM behind it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.deploy.values import values
from components.serving.profiles import A10G, SUMS_FILE, Serving
from components.store.artifact import Artifact, commit
from components.store.backend import Store
from pipelines import seaweed
from pipelines.deployment import smoke, waiting
from pipelines.deployment.api import Namespace
from pipelines.deployment.evidence import Evidence, gather
from tests.charts.conftest import IMAGE
from tests.kubernetes_api.server import ADMIN, Api
from tests.kubernetes_api.server import serving as serving_api
from tests.kubernetes_api.state import NAMESPACE
from tests.manifests.rules import rights
from tests.pipelines.deployment import vllm_stand_in

PAIR = Serving(profiles={"a10g": A10G.model_copy(update={"num_speculative_tokens": 15})})
MANIFEST: dict[str, Any] = {"config": {}, "inputs": {}, "metrics": {}, "seconds": 1, "started": 1.0, "versions": {}}
LENGTH = {"value": 3.0, "low": 2.5, "high": 3.5}
ROLES = Path(__file__).parents[3] / "manifests" / "base" / "roles.yaml"
TOKEN = "of-the-deploy-account"
Made = Callable[..., Artifact]


@pytest.fixture(scope="module")
def made(s3: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Commit a bundle and all that stands behind it; return what the deploy stage wrote."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.items():
            patch.setenv(name, value)
        store = Store(f"s3://{seaweed.BUCKET}/deployment")

        def artifact(stage: str, digit: str, files: dict[str, str], **manifest: Any) -> Artifact:
            folder = tmp_path_factory.mktemp(stage)
            for path, text in files.items():
                (folder / path).write_text(text)
            return commit(store, stage, digit * 64, folder, MANIFEST | manifest)[0]

        def gated(digit: str, passed: bool = True, length: dict[str, float] | None = LENGTH) -> Artifact:
            bundle = artifact("bundle", digit, {"config.json": f"{{}}{digit}", SUMS_FILE: digit})
            samples = [sample(number) for number in range(12)]
            metrics = {"acceptance_length": length} if length else {}
            text = "".join(json.dumps(one) + "\n" for one in samples)
            measure = artifact(
                "measure", digit, {"samples.jsonl": text}, inputs={"model": [bundle.uri]}, metrics=metrics
            )
            verdict = {"passed": passed, "failed": [] if passed else ["parity"]}
            gate = artifact("gate", digit, {"v": "v"}, inputs={"measurements": [measure.uri]}, metrics=verdict)
            floor = length["low"] if length else None
            written = yaml.safe_dump(values(bundle, PAIR, "a10g", IMAGE, floor))
            inputs = {"bundle": [bundle.uri], "verdict": [gate.uri]}
            return artifact("deploy", digit, {"values.yaml": written}, inputs=inputs)

        yield gated


def sample(number: int) -> dict[str, Any]:
    """One measured answer of 8 tokens: 4 drafts, 2 tokens accepted in each."""
    return {
        "id": str(number),
        "prompt_token_ids": [1, 2, number],
        "token_ids": [9] * 8,
        "concurrency": 1,
        "drafts": 4,
        "accepted": [4, 4, 0],
    }


@pytest.fixture(scope="module")
def first(made: Made) -> Evidence:
    found = made("a")
    return gather(found.store, f"bundle/{'a' * 64}")


@pytest.fixture(scope="module")
def second(made: Made) -> Evidence:
    found = made("b")
    return gather(found.store, found.uri)


@pytest.fixture
def api() -> Iterator[Api]:
    with serving_api() as found:
        yield found


@pytest.fixture
def vllm() -> Iterator[vllm_stand_in.Server]:
    with vllm_stand_in.serving() as found:
        yield found


@pytest.fixture
def account(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Namespace]:
    """Return the namespace as the account of a token sees it, by a kubeconfig."""
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(smoke, "SETTLE_SECONDS", 0)

    def of(token: str = ADMIN) -> Namespace:
        path = tmp_path / f"{token}.json"
        path.write_text(api.kubeconfig(token))
        for module in ("kubernetes.config", "kubernetes.config.kube_config"):  # KUBECONFIG, read when it was imported
            monkeypatch.setattr(f"{module}.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
        return Namespace(NAMESPACE)

    return of


@pytest.fixture
def namespace(account: Callable[[str], Namespace]) -> Namespace:
    return account(ADMIN)


@pytest.fixture
def deployer(api: Api, account: Callable[[str], Namespace]) -> Namespace:
    """The namespace as the Role of the manifests lets the deploy account see it."""
    held = rights(list(yaml.safe_load_all(ROLES.read_text())), "qdflash-deploy")
    api.state.rights[TOKEN] = ("qdflash-deploy", held)
    return account(TOKEN)
