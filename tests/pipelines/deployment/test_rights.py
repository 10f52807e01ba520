"""The account that deploys needs exactly what it asks for, has it by its Role, and is told by name what it lacks."""

from collections.abc import Callable

import pytest

from components.contract.errors import StageError, UserError
from pipelines.deployment import rollout
from pipelines.deployment.api import Namespace
from pipelines.deployment.chart import render
from pipelines.deployment.evidence import Evidence
from pipelines.deployment.preflight import demand_rights, rights
from tests.kubernetes_api.controllers import playing
from tests.kubernetes_api.server import Api
from tests.kubernetes_api.servers import serves, unready, waiting
from tests.kubernetes_api.state import NAMESPACE
from tests.pipelines.deployment.conftest import TOKEN
from tests.pipelines.deployment.vllm_stand_in import Server


def test_the_role_suffices_and_all_that_is_asked_for_is_used(
    api: Api,
    deployer: Namespace,
    first: Evidence,
    second: Evidence,
    vllm: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    objects, _ = render(first.values, "pair", NAMESPACE)
    crashed = [waiting("kserve-container", "CrashLoopBackOff", restarts=3, last={"exitCode": 1})]
    with playing(api, {"InferenceService": serves(vllm.address)}):
        rollout.deploy(deployer, "pair", first, [], False, said.append)
        rollout.deploy(deployer, "pair", second, [], False, said.append)
        rollout.rollback(deployer, "pair", said.append)
    monkeypatch.setattr(rollout, "STARTUP_SECONDS", 0.2)
    with (
        playing(api, {"InferenceService": unready({"containerStatuses": crashed})}),
        pytest.raises(StageError, match="not ready"),
    ):
        rollout.deploy(deployer, "pair", second, [], False, said.append)
    rollout.undeploy(deployer, "pair", said.append)
    both = {("", "pods/portforward", "create")}  # a WebSocket's GET is a create to newer servers
    route = {("gateway.networking.k8s.io", "httproutes", "delete")}  # which there might be
    assert api.state.used == (rights(deployer, objects) | route) - both
    assert len([line for line in said if line.endswith("not checked")]) == 3 * 2  # KServe and nodes, by each deploy


def test_each_missing_right_is_named(api: Api, deployer: Namespace, first: Evidence) -> None:
    objects, _ = render(first.values, "pair", NAMESPACE)
    demand_rights(deployer, objects)
    account, held = api.state.rights[TOKEN]
    assert held is not None
    for group, resource, verb in sorted(rights(deployer, objects)):
        api.state.rights[TOKEN] = (account, held - {(group, resource, verb)})
        named = f"may not {verb} {resource}{'.' if group else ''}{group}; see"
        with pytest.raises(UserError, match=named):
            demand_rights(deployer, objects)
    assert set(api.state.objects) == {key for key in api.state.objects if key[0].kind == "Namespace"}


def test_a_stranger_is_told(account: Callable[[str], Namespace], first: Evidence) -> None:
    with pytest.raises(UserError, match="Kubernetes: 401 Unauthorized"):
        rollout.deploy(account("a-guess"), "pair", first, [], True, print)
