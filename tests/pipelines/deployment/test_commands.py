"""The commands, as they are typed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from components.contract.errors import TransientError
from pipelines.cli import app
from pipelines.deployment.api import Namespace
from pipelines.deployment.evidence import Evidence
from tests.kubernetes_api.controllers import playing
from tests.kubernetes_api.server import Api
from tests.kubernetes_api.servers import serves
from tests.pipelines.deployment.vllm_stand_in import Server

Type = Callable[..., str]


@pytest.fixture
def typed(namespace: Namespace) -> Type:
    def run(*words: str) -> str:
        done = CliRunner().invoke(app, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


def test_from_a_bundle_to_a_service_and_back(
    api: Api, typed: Type, first: Evidence, vllm: Server, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("podDisruptionBudget: {enabled: false}\n")
    bundle = [first.bundle.uri, "--values", str(mine)]
    said = typed("deploy", *bundle, "--dry-run")
    assert "new: InferenceService/pair" in said
    assert "PodDisruptionBudget" not in said
    assert "nothing deployed" in typed("deployed")
    with playing(api, {"InferenceService": serves(vllm.address)}):
        assert typed("deploy", *bundle).endswith("pair: revision 1 serves\n")
        assert "pair-predictor-1-abcde: ready" in typed("deployed")
        found = json.loads(typed("deployed", "--json"))
        assert found["revisions"][0]["bundle"] == first.bundle.uri
        assert found["pods"] == {"pair-predictor-1-abcde": "ready"}
        assert "takes 20 % of" in typed("canary", first.bundle.uri, "--weight", "20", "--gateway", "gateways/public")
        with pytest.raises(TransientError, match="watch longer"):
            typed("promote", "--minutes", "0")
        assert "removed: InferenceService/pair-canary" in typed("abort")
        typed("deploy", first.bundle.uri)
        typed("rollback")
        assert "3  deployed" in typed("deployed")
        assert "removed: InferenceService/pair" in typed("undeploy")
    assert "nothing deployed" in typed("deployed")
