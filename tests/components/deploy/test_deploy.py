"""What the deploy stage writes for a gated bundle, and what it refuses."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.contract.cli import main
from components.contract.digest import stage_digest
from components.contract.errors import UserError
from components.deploy import stage
from components.deploy.values import values
from components.serving.arguments import arguments, environment
from components.serving.profiles import A10G, Serving, write_serving
from components.store import Artifact, Store, commit, read_manifest

PAIR = Serving(profiles={"a10g": A10G.model_copy(update={"num_speculative_tokens": 15})})
MANIFEST: dict[str, Any] = {"config": {}, "inputs": {}, "metrics": {}, "seconds": 1, "versions": {}}


@pytest.fixture
def bundle(tmp_path: Path, home: Path) -> Artifact:
    folder = tmp_path / "bundle"
    folder.mkdir()
    write_serving(folder, PAIR)
    (folder / "SHA256SUMS").write_text("sums")
    return commit(Store(str(tmp_path / "store")), "bundle", "b" * 64, folder, MANIFEST)[0]


def verdict_on(bundle: Artifact, folder: Path, passed: bool, acceptance: dict[str, Any] | None = None) -> Artifact:
    folder.mkdir()
    (folder / "page").write_text("x")
    about = {**MANIFEST, "inputs": {"model": [bundle.uri]}}
    about["metrics"] = {"acceptance_length": acceptance} if acceptance else {}
    measured, _ = commit(bundle.store, "measure", "c" * 64, folder, about)
    metrics = {"passed": passed, "failed": [] if passed else ["parity"]}
    judged = {**MANIFEST, "inputs": {"measurements": [measured.uri]}, "metrics": metrics}
    return commit(bundle.store, "gate", "d" * 64, folder, judged)[0]


def deploy(bundle: Artifact, verdict: Artifact) -> tuple[int, Artifact | None]:
    config = stage.Config()
    digest = stage_digest("deploy", stage.VERSION, config, {"bundle": [bundle.digest], "verdict": [verdict.digest]})
    argv = [
        "--config",
        config.model_dump_json(),
        "--input",
        f"bundle={bundle.uri}",
        "--input",
        f"verdict={verdict.uri}",
    ]
    code = main("deploy", [*argv, "--output", bundle.store.uri(f"deploy/{digest}")])
    return code, read_manifest(bundle.store, "deploy", digest)


def test_the_values_hold_every_argument_of_the_bundle_s_profile(bundle: Artifact, tmp_path: Path) -> None:
    verdict = verdict_on(bundle, tmp_path / "measured", True, {"value": 3.2, "low": 3.01236, "high": 3.4})
    code, made = deploy(bundle, verdict)
    assert code == 0
    assert made is not None
    written = yaml.safe_load(bundle.store.read(made.key("values.yaml")) or b"")
    assert written["bundle"]["artifact"] == bundle.uri
    assert written["bundle"]["uri"] == bundle.store.uri(bundle.key("")) == made.metrics["storage_uri"]
    assert written["bundle"]["uri"].endswith(f"/{bundle.manifest['attempt']}/")
    assert written["bundle"]["sums"] == hashlib.sha256(b"sums").hexdigest()
    assert written["bundle"]["acceptanceFloor"] == 3.0124
    expected = arguments(
        PAIR.profiles["a10g"], "/mnt/models", "/mnt/models/draft", host="0.0.0.0", port=written["serving"]["port"]
    )
    assert ["vllm", *written["serving"]["args"]] == expected
    assert '"num_speculative_tokens": 15' in written["serving"]["args"][-1]
    assert written["serving"]["env"] == environment(PAIR.profiles["a10g"])


def test_a_refused_bundle_is_not_deployed(bundle: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert deploy(bundle, verdict_on(bundle, tmp_path / "measured", False)) == (3, None)
    assert "the gate refused this bundle: parity" in capsys.readouterr().err


def test_another_bundle_s_verdict_permits_nothing(
    bundle: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = Artifact(bundle.store, "bundle", "e" * 64, bundle.manifest)
    assert deploy(bundle, verdict_on(other, tmp_path / "measured", True)) == (3, None)
    assert f"not given on bundle {bundle.digest[:16]}" in capsys.readouterr().err


def test_a_bundle_without_the_profile_or_its_block_is_refused(bundle: Artifact) -> None:
    with pytest.raises(UserError, match="choose one of a10g"):
        values(bundle, PAIR, "h200", "image")
    with pytest.raises(UserError, match="num_speculative_tokens"):
        values(bundle, Serving(profiles={"a10g": A10G}), "a10g", "image")


@pytest.mark.parametrize("acceptance", [None, {"value": None, "low": None, "high": None}, {"value": 2.0, "low": None}])
def test_a_bundle_without_an_interval_has_no_floor(bundle: Artifact, tmp_path: Path, acceptance: dict | None) -> None:
    code, made = deploy(bundle, verdict_on(bundle, tmp_path / "measured", True, acceptance))
    assert code == 0
    assert made is not None
    assert "acceptanceFloor" not in yaml.safe_load(bundle.store.read(made.key("values.yaml")) or b"")["bundle"]


def test_a_bundle_without_checksums_is_refused(bundle: Artifact) -> None:
    files = [one for one in bundle.files if one["path"] != "SHA256SUMS"]
    without = Artifact(bundle.store, "bundle", bundle.digest, {**bundle.manifest, "files": files})
    with pytest.raises(UserError, match="has no SHA256SUMS"):
        values(without, PAIR, "a10g", "image")
