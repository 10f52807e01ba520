"""The cluster that eksctl is told to make has the roles that accounts name and the nodes that pods ask for."""

from typing import Any

import pytest
import yaml
from kubernetes.utils import parse_quantity

from components.contract.stage import load
from pipelines.cli import SHIPPED
from pipelines.cluster import Placement
from pipelines.dag import build
from pipelines.recipe import load_recipe
from tests.manifests.conftest import MANIFESTS
from tests.pipelines.planning import OWN

EKS = MANIFESTS / "overlays" / "eks-a10g"
CLUSTER = yaml.safe_load((EKS / "cluster.yaml").read_text())
ROOM = {"m6i.4xlarge": (16, 64, 0), "p5en.48xlarge": (192, 2048, 8), "g5.xlarge": (4, 16, 1)}
"""vCPU, GiB and GPUs of an instance."""
LEFT = 0.8
"""Of which Kubernetes, the system and daemons leave this much at least."""


def takes(pool: dict[str, Any], placement: Placement) -> bool:
    """Say whether a node of the pool can hold a pod."""
    cpus, memory, gpus = ROOM[pool["instanceType"]]
    labels = {"node.kubernetes.io/instance-type": pool["instanceType"]}
    tolerated = {one.key for one in placement.tolerations or ()}
    return (
        (placement.node_selector or {}).items() <= labels.items()
        and {one["key"] for one in pool.get("taints", ())} <= tolerated
        and (placement.gpus or 0) <= gpus
        and parse_quantity(placement.cpu or "0") <= LEFT * cpus
        and parse_quantity(placement.memory or "0") <= LEFT * memory * 2**30
    )


def test_every_pod_of_the_4b_recipe_finds_a_node() -> None:
    recipe = load_recipe(SHIPPED["qwen3.5-4b-a10g"], OWN["qwen3.5-4b-a10g"])
    pools = {pool["name"]: pool for pool in CLUSTER["managedNodeGroups"]}
    homes = {
        task: {name for name, pool in pools.items() if takes(pool, recipe.cluster.placement(task, role))}
        for task, role in ((one.name, load(one.stage).ROLE) for one in build(recipe))
    }
    assert [task for task, names in homes.items() if not names] == []
    assert homes["qad"] == {"training"}
    assert homes["measure_pair"] == {"a10g"}
    assert "cpu" in homes["gate"] & homes["sequences"] & homes["teacher"]


def test_the_roles_are_those_that_the_accounts_name() -> None:
    accounts = list(yaml.safe_load_all((EKS / "accounts.yaml").read_text()))
    named = {
        one["metadata"]["name"]: one["metadata"]["annotations"]["eks.amazonaws.com/role-arn"].rpartition("/")[2]
        for one in accounts
    }
    made = {one["metadata"]["name"]: one for one in CLUSTER["iam"]["serviceAccounts"]}
    assert {name: one["roleName"] for name, one in made.items()} == named
    assert all(one["roleOnly"] and one["metadata"]["namespace"] == "qdflash" for one in made.values())


@pytest.mark.parametrize(("account", "writes"), [("qdflash-stage", True), ("qdflash-deploy", False)])
def test_only_who_runs_stages_may_write(account: str, writes: bool) -> None:
    (role,) = [one for one in CLUSTER["iam"]["serviceAccounts"] if one["metadata"]["name"] == account]
    allowed = {action for one in role["attachPolicy"]["Statement"] for action in one["Action"]}
    assert {"s3:GetObject", "s3:ListBucket"} <= allowed
    assert ({"s3:PutObject", "s3:DeleteObject"} <= allowed) == writes
    assert {one["Resource"] for one in role["attachPolicy"]["Statement"]} == {
        "arn:aws:s3:::BUCKET",
        "arn:aws:s3:::BUCKET/*",
    }
