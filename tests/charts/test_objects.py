"""The chart's objects: from the bundle's arguments, locked down, and of the schemas in every variant."""

import itertools
from collections.abc import Iterator
from functools import reduce
from typing import Any

import helm_python
import pytest
import yaml

from components.serving.arguments import arguments, environment
from components.serving.drain import ARRIVAL_SECONDS, ENDPOINTS_SECONDS
from tests.charts.conftest import CHART, IMAGE, PAIR, SUMS, Render, merged
from tests.kubelet import GRACE_BEYOND_DRAIN
from tests.schemas import faults, pod_spec

DRAIN = ("--middleware", "components.serving.drain.RefuseWhileDraining")
MODES = ("kserve", "deployment")
KEY = {"apiKey": {"secretName": "clients", "secretKey": "api-key"}}
ROLE = {"s3": {"roleArn": "arn:aws:iam::123456789012:role/read-bundles", "region": "eu-west-1"}}
SECRET = {"s3": {"secretName": "store", "endpoint": "http://seaweedfs.qdflash.svc:8333", "region": "us-east-1"}}
MONITOR = {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}
ALERTS = {
    "alerts": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "firstTokenSeconds": 3,
        "interTokenSeconds": 0.2,
        "waiting": 8,
    },
    "dashboard": {"enabled": True, "labels": {"grafana_dashboard": "1", "team": "serving"}},
}
KEDA = {
    "keda": {
        "enabled": True,
        "prometheus": "http://prometheus.monitoring:9090",
        "maxReplicas": 3,
        "requestsPerReplica": 8,
    }
}
BARE = {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}}
PLACED = {
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"node.kubernetes.io/instance-type": None, "nvidia.com/gpu.product": "NVIDIA-A10G"},
    "tolerations": {"gpu": None, "spot": {"key": "spot", "operator": "Equal", "value": "yes"}},
    "kserve": {"deploymentMode": "RawDeployment"},
    "resources": {"requests": {"cpu": "2"}},
    "networkPolicy": {
        "from": [{"namespaceSelector": {"matchLabels": {"team": "web"}}}],
        "store": [{"ipBlock": {"cidr": "0.0.0.0/0"}}],
        "storePorts": [443, 8333],
    },
    "replicas": 2,
    "shm": "1Gi",
    "startupMinutes": 5,
    "drainSeconds": 30,
}
NO_GPU = {
    "resources": {"requests": {"nvidia.com/gpu": None}, "limits": {"nvidia.com/gpu": None}},
    "nodeSelector": {"node.kubernetes.io/instance-type": None},
    "tolerations": {"gpu": None},
}
SWITCHES = ({}, KEY, ROLE, SECRET, MONITOR, ALERTS, KEDA, BARE, PLACED, NO_GPU)
VARIANTS = [merged({"mode": mode}, switch) for mode, switch in itertools.product(MODES, SWITCHES)]
EVERYTHING = [reduce(merged, (KEY, SECRET, MONITOR, ALERTS, KEDA), {"mode": mode}) for mode in MODES]


@pytest.mark.parametrize("changes", [*VARIANTS, *EVERYTHING], ids=str)
def test_every_variant_passes_lint_and_the_schemas(given: dict[str, Any], render: Render, changes: dict) -> None:
    report = helm_python.lint(CHART, merged(given, changes), strict=True, namespace="serving")
    assert not report["errors"]
    assert [one["error"] for one in report["messages"]] == ["icon is recommended"]
    assert faults(list(render(changes).values())) == []


def test_the_variants_set_every_value_that_there_is(given: dict[str, Any]) -> None:
    def leaves(values: dict[str, Any], *above: str) -> Iterator[tuple[str, ...]]:
        for key, value in values.items():
            yield from leaves(value, *above, key) if isinstance(value, dict) and value else [(*above, key)]

    def settings(values: dict[str, Any]) -> set[tuple[str, ...]]:
        """Maps of the operator's own names count as one value."""
        return {path[:1] if path[0] in ("nodeSelector", "tolerations") else path[:2] for path in leaves(values)}

    varied = set().union(*map(settings, [given, *VARIANTS]))
    assert settings(yaml.safe_load((CHART / "values.yaml").read_text())) - varied == set()


@pytest.mark.parametrize("mode", MODES)
def test_vllm_is_called_as_the_bundle_says(render: Render, mode: str) -> None:
    container = server(render({"mode": mode}))
    expected = arguments(
        PAIR.profile("a10g"), "/mnt/models", "/mnt/models/draft", served_model_name="pair", host="0.0.0.0", port=8080
    )
    assert container["command"] == ["python", "-m", "components.serving.start"]
    assert ["vllm", *container["args"]] == [*expected, "--shutdown-timeout", "60", *DRAIN]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert variables == {**environment(PAIR.profile("a10g")), "HOME": "/tmp", "QDFLASH_SUMS": SUMS}
    assert container["image"] == IMAGE


def test_both_modes_run_the_same_container(render: Render) -> None:
    one, other = (server(render(merged({"mode": mode}, KEY))) for mode in MODES)
    mounts = [mount for mount in other["volumeMounts"] if mount["name"] != "bundle"]
    assert one | {"name": "vllm"} == other | {"volumeMounts": mounts}


def test_kinds_by_mode_and_switch(render: Render) -> None:
    always = {"ServiceAccount", "NetworkPolicy", "PodDisruptionBudget"}
    assert set(render()) == always | {"ServingRuntime", "InferenceService"}
    assert set(render({"mode": "deployment"})) == always | {"Deployment", "Service"}
    assert set(render(BARE)) == {"ServiceAccount", "ServingRuntime", "InferenceService"}
    assert set(render(MONITOR)) - set(render()) == {"ServiceMonitor", "Service"}
    assert set(render(KEDA)) - set(render()) == {"ScaledObject"}
    assert set(render(ALERTS)) - set(render()) == {"PrometheusRule", "ConfigMap"}


def test_the_inference_service_names_the_runtime_the_account_and_the_prefix(render: Render) -> None:
    objects = render(ROLE)
    predictor = objects["InferenceService"]["spec"]["predictor"]
    assert predictor["model"]["runtime"] == objects["ServingRuntime"]["metadata"]["name"]
    assert predictor["serviceAccountName"] == objects["ServiceAccount"]["metadata"]["name"]
    assert predictor["model"]["storageUri"] == f"s3://bucket/runs/bundle/{'a' * 64}/0123456789ab/"
    formats = objects["ServingRuntime"]["spec"]["supportedModelFormats"]
    assert predictor["model"]["modelFormat"] in formats
    annotations = objects["ServiceAccount"]["metadata"]["annotations"]
    assert annotations["eks.amazonaws.com/role-arn"] == ROLE["s3"]["roleArn"]
    assert objects["InferenceService"]["metadata"]["annotations"]["serving.kserve.io/deploymentMode"] == "Standard"


@pytest.mark.parametrize("mode", MODES)
def test_one_gpu_is_given_back_before_it_is_asked_for(render: Render, mode: str) -> None:
    objects = render({"mode": mode})
    strategy = (
        objects["InferenceService"]["spec"]["predictor"]["deploymentStrategy"]
        if mode == "kserve"
        else objects["Deployment"]["spec"]["strategy"]
    )
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}


def test_the_pod_fits_a_g5_xlarge(render: Render) -> None:
    """4 vCPU and 16 GiB a node; /dev/shm counts as memory of the pod."""
    resources = server(render())["resources"]
    assert float(resources["requests"]["cpu"]) <= 3
    assert float(resources["limits"]["memory"].removesuffix("Gi")) <= 13
    assert resources["limits"]["nvidia.com/gpu"] == "1"
    predictor = render()["InferenceService"]["spec"]["predictor"]
    assert predictor["nodeSelector"] == {"node.kubernetes.io/instance-type": "g5.xlarge"}
    assert predictor["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_selectors_and_tolerations_are_maps_that_can_be_taken_apart(render: Render) -> None:
    predictor = render(PLACED)["InferenceService"]["spec"]["predictor"]
    assert predictor["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A10G"}
    assert predictor["tolerations"] == [PLACED["tolerations"]["spot"]]


@pytest.mark.parametrize("mode", MODES)
def test_a_slow_start_is_waited_for_and_a_stop_too(render: Render, mode: str) -> None:
    objects = render({"mode": mode, "startupMinutes": 30, "drainSeconds": 90})
    container = server(objects)
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 30 * 60
    for probe in (startup, container["readinessProbe"], container["livenessProbe"]):
        assert probe["exec"]["command"] == ["python", "-m", "components.serving.ready", "--port", "8080"]
    assert container["args"][-4:] == ["--shutdown-timeout", "90", *DRAIN]
    hook = ["python", "-m", "components.serving.drain", "--port", "8080", "--seconds", "90"]
    assert container["lifecycle"]["preStop"]["exec"]["command"] == hook
    pod = pod_spec(objects["InferenceService" if mode == "kserve" else "Deployment"])
    assert pod is not None
    assert pod["terminationGracePeriodSeconds"] == 90 + GRACE_BEYOND_DRAIN
    assert GRACE_BEYOND_DRAIN > 2 * (ENDPOINTS_SECONDS + ARRIVAL_SECONDS)


def test_keys_are_named_and_never_written(render: Render) -> None:
    objects = render(merged(merged({"mode": "deployment"}, KEY), SECRET))
    container = server(objects)
    assert container["args"][-2:] == ["--middleware", "components.serving.key.KeyOnEveryRoute"]
    key = next(one for one in container["env"] if one["name"] == "VLLM_API_KEY")
    assert key["valueFrom"] == {"secretKeyRef": {"name": "clients", "key": "api-key"}}
    weights = objects["Deployment"]["spec"]["template"]["spec"]["initContainers"][0]
    named = {one["name"]: one["valueFrom"]["secretKeyRef"]["name"] for one in weights["env"] if "valueFrom" in one}
    assert named == {"AWS_ACCESS_KEY_ID": "store", "AWS_SECRET_ACCESS_KEY": "store"}
    assert objects["ServiceAccount"]["secrets"] == [{"name": "store"}]
    assert "components.serving.key.KeyOnEveryRoute" not in server(render())["args"]


def test_the_policy_opens_the_server_s_port_and_the_store_s(render: Render) -> None:
    spec = render()["NetworkPolicy"]["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["ingress"] == [{"from": [{"podSelector": {}}], "ports": [{"port": 8080, "protocol": "TCP"}]}]
    assert [port["port"] for rule in spec["egress"] for port in rule["ports"]] == [53, 53, 443]
    assert [peer["ipBlock"]["cidr"] for peer in spec["egress"][-1]["to"]] == [
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
    ]
    placed = render(PLACED)["NetworkPolicy"]["spec"]
    assert placed["ingress"][0]["from"] == PLACED["networkPolicy"]["from"]


@pytest.mark.parametrize("mode", MODES)
def test_everything_selects_the_pods_and_scales_the_workload(render: Render, mode: str) -> None:
    objects = render(merged(merged({"mode": mode}, MONITOR), KEDA))
    labels = (
        objects["InferenceService"]["spec"]["predictor"]["labels"]
        if mode == "kserve"
        else objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    )
    assert objects["Service"]["spec"]["selector"] == labels
    assert objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    wanted = objects["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= objects["Service"]["metadata"]["labels"].items()
    port = objects["ServiceMonitor"]["spec"]["endpoints"][0]["port"]
    assert port in [one["name"] for one in objects["Service"]["spec"]["ports"]]
    target = objects["ScaledObject"]["spec"]["scaleTargetRef"]["name"]
    assert target == {"kserve": "pair-predictor", "deployment": "pair"}[mode]
    if mode == "deployment":
        assert "replicas" not in objects["Deployment"]["spec"]
    else:
        assert objects["InferenceService"]["spec"]["predictor"]["maxReplicas"] == 3


def server(objects: dict[str, Any]) -> dict[str, Any]:
    workload = objects.get("ServingRuntime") or objects["Deployment"]
    spec = pod_spec(workload)
    assert spec is not None
    return spec["containers"][0]
