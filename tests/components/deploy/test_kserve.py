"""The rendered objects against the real CRD schemas, and the refusals."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.contract.errors import UserError
from components.deploy.kserve import objects
from components.deploy.stage import Config
from components.serving.profiles import A10G, Serving

CRDS = Path(__file__).parents[4] / "shared" / "crds" / "validate.py"
PAIR = Serving(profiles={"a10g": A10G.model_copy(update={"num_speculative_tokens": 15})})
URI = "s3://bucket/runs/bundle/abc/attempt/"


def test_every_argument_of_the_profile_reaches_the_container():
    _, runtime, service = objects(Config(), PAIR, URI)
    container = runtime["spec"]["containers"][0]
    line = " ".join(container["command"] + container["args"])
    assert line.startswith("vllm serve /mnt/models ")
    assert "--max-model-len 8704" in line
    assert '"model": "/mnt/models/draft", "num_speculative_tokens": 15' in line
    assert "--no-enable-prefix-caching" in line
    predictor = service["spec"]["predictor"]
    assert predictor["model"]["storageUri"].endswith("/")
    assert predictor["model"]["runtime"] == runtime["metadata"]["name"]
    assert predictor["deploymentStrategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_the_container_is_locked_down_and_fits_a_g5_xlarge():
    container = objects(Config(), PAIR, URI)[1]["spec"]["containers"][0]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["runAsNonRoot"] is True
    assert int(container["resources"]["limits"]["memory"].removesuffix("Gi")) < 16
    assert int(container["resources"]["requests"]["cpu"]) <= 3


def test_a_bundle_without_the_profile_or_its_block_is_refused():
    with pytest.raises(UserError, match="choose one of a10g"):
        objects(Config(profile="h200"), PAIR, URI)
    with pytest.raises(UserError, match="num_speculative_tokens"):
        objects(Config(), Serving(profiles={"a10g": A10G}), URI)


@pytest.mark.skipif(not CRDS.exists(), reason="the CRD schemas are not part of the project")
def test_the_objects_hold_against_the_crds(tmp_path):
    rendered = tmp_path / "kserve.yaml"
    rendered.write_text(yaml.safe_dump_all(objects(Config(), PAIR, URI)))
    result = subprocess.run([sys.executable, str(CRDS), str(rendered)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 checked, 0 failed" in result.stdout
