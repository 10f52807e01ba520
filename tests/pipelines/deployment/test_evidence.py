"""What may be deployed, and what of its measurement is asked again."""

import pytest

from components.contract.errors import GateError, UserError
from pipelines.artifacts import find
from pipelines.deployment import rollout
from pipelines.deployment.api import Namespace
from pipelines.deployment.chart import render
from pipelines.deployment.evidence import Evidence, gather
from pipelines.deployment.preflight import damaged
from tests.kubernetes_api.state import NAMESPACE
from tests.pipelines.deployment.conftest import Made, sample


def test_the_floor_is_moved_to_the_prompts_that_are_asked(made: Made) -> None:
    """On the eight prompts 1 + 8 / 4 = 3 was measured, on all 4; so a bound of 3.2 on all is one of 2.4 on them."""
    found = made("c", length={"value": 4.0, "low": 3.2, "high": 4.5})
    evidence = gather(found.store, f"bundle/{found.digest}")
    assert evidence.prompts == [sample(number) for number in range(8)]
    assert (evidence.expected, evidence.floor) == (3.0, pytest.approx(2.4))


def test_an_unmeasured_acceptance_has_no_floor(made: Made) -> None:
    found = made("d", length=None)
    evidence = gather(found.store, found.uri)
    assert (evidence.prompts, evidence.expected, evidence.floor) == ([], None, None)


def test_what_is_no_gated_bundle_is_refused(made: Made) -> None:
    found = made("e", passed=False)
    store, bundle = found.store, f"bundle/{'e' * 64}"
    with pytest.raises(GateError, match="the gate refused it: parity"):
        gather(store, bundle)
    with pytest.raises(UserError, match="a gate, neither bundle nor deploy"):
        gather(store, f"gate/{'e' * 64}")
    store.delete(f"deploy/{'e' * 64}")
    with pytest.raises(UserError, match="no deploy stage has run on it"):
        gather(store, bundle)


def test_a_damaged_bundle_is_not_deployed(made: Made, namespace: Namespace) -> None:
    found = made("f")
    evidence = gather(found.store, found.uri)
    assert damaged(evidence.bundle) == []
    found.store.write(evidence.bundle.key("config.json"), b"{}x")
    with pytest.raises(UserError, match=r"not deployed: .*config\.json: sha256 differs"):
        rollout.deploy(namespace, "pair", evidence, [], True, print)


def test_values_that_the_chart_refuses_are_an_error_of_one_line(first: Evidence) -> None:
    with pytest.raises(UserError, match=r"charts/qdflash: .*image.*--values FILE") as caught:
        render(first.values | {"image": "qdflash-vllm"}, "pair", NAMESPACE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("stage", "path"), [("deploy", "values.yaml"), ("measure", "samples.jsonl")])
def test_what_stands_behind_a_bundle_is_read_as_it_was_written(made: Made, stage: str, path: str) -> None:
    found = made("d" if stage == "deploy" else "9")
    one = find(found.store, f"{stage}/{found.digest}")
    whole = found.store.read(one.key(path))
    assert whole is not None
    gather(found.store, found.uri)
    found.store.write(one.key(path), whole[:-9])
    with pytest.raises(UserError, match=f"{stage}/.*: {path} is missing or altered"):
        gather(found.store, found.uri)
    found.store.delete(one.key(path))
    with pytest.raises(UserError, match=f"{stage}/.*: {path} is missing or altered"):
        gather(found.store, found.uri)
