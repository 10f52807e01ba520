"""What the chart refuses, each for the reason given; and that the checks on its objects bite."""

from typing import Any

import helm_python
import pytest

from tests.charts.conftest import Render
from tests.charts.test_objects import EVERYTHING
from tests.schemas import faults

DIGEST = "a" * 64


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"image": "qdflash-vllm"}, "/image"),
        ({"image": "qdflash-vllm:latest"}, "/image"),
        ({"image": "qdflash-vllm@sha256:abc"}, "/image"),
        ({"image": f"#x@sha256:{DIGEST}"}, "/image"),
        ({"bundle": {"uri": f"s3://bucket/runs/bundle/{DIGEST}/0123456789ab"}}, "/bundle/uri"),
        ({"bundle": {"uri": f"/var/runs/bundle/{DIGEST}/0123456789ab/"}}, "/bundle/uri"),
        ({"bundle": {"artifact": "s3://bucket/runs/bundle/latest"}}, "/bundle/artifact"),
        ({"bundle": {"sums": ""}}, "/bundle/sums"),
        ({"bundle": {"acceptanceFloor": 0.5}}, "/bundle/acceptanceFloor"),
        ({"serving": {"args": []}}, "/serving/args"),
        ({"serving": {"args": ["serve", "/somewhere"]}}, "/serving/args"),
        ({"serving": {"args": ["serve", "/mnt/models", "--max-num-seqs", 1]}}, "/serving/args"),
        ({"serving": {"args": ["serve", "/mnt/models", "--trust-remote-code"]}}, "/serving/args"),
        ({"serving": {"args": ["serve", "/mnt/models", "--api-key=open-sesame"]}}, "/serving/args"),
        ({"serving": {"args": ["serve", "/mnt/models", "--load-format", "pt"]}}, "/serving/args"),
        ({"serving": {"args": ["serve", "/mnt/models", "--trust-request-chat-template"]}}, "/serving/args"),
        # vLLM reads these three as --trust-remote-code, --api-key and --middleware
        ({"serving": {"args": ["serve", "/mnt/models", "--trust_remote_code"]}}, "/serving/args"),
        ({"serving": {"args": ["serve", "/mnt/models", "--api-k", "open-sesame"]}}, "/serving/args"),
        ({"serving": {"args": ["serve", "/mnt/models", "--middle", "a.b"]}}, "/serving/args"),
        ({"serving": {"env": {"VLLM_API_KEY": "open-sesame"}}}, "/serving/env"),
        ({"serving": {"env": {"QDFLASH_SUMS": "d" * 64}}}, "/serving/env"),
        ({"serving": {"env": {"VLLM_USE_V2": 1}}}, "/serving/env"),
        ({"serving": {"env": {"LD_PRELOAD": "evil.so"}}}, "/serving/env"),
        ({"serving": {"env": {"HOME": "elsewhere"}}}, "/serving/env"),
        ({"serving": {"env": {"VLLM_SERVER_DEV_MODE": "1"}}}, "/serving/env"),
        ({"serving": {"env": {"TRITON_CACHE_DIR": "/mnt/models/cache"}}}, "/serving/env"),
        ({"serving": {"args": ["serve", "/mnt/models", "--hf-token", "open-sesame"]}}, "/serving/args"),
        ({"serving": {"args": ["serve", "/mnt/models", "--config=/mnt/models/x.yaml"]}}, "/serving/args"),
        ({"serving": {"port": 80}}, "/serving/port"),
        ({"mode": "knative"}, "/mode"),
        ({"kserve": {"deploymentMode": "Serverless"}}, "/kserve/deploymentMode"),
        ({"s3": {"roleArn": "reader"}}, "/s3/roleArn"),
        ({"s3": {"roleArn": "arn:aws:iam::123456789012:role/reader", "secretName": "store"}}, "/s3"),
        ({"s3": {"endpoint": "seaweedfs:8333"}}, "/s3/endpoint"),
        ({"s3": {"secretKey": "open-sesame"}}, "/s3"),
        ({"apiKey": {"key": "open-sesame"}}, "/apiKey"),
        ({"apiKey": {"secretName": "Not A Name"}}, "/apiKey/secretName"),
        ({"replicas": 0}, "/replicas"),
        ({"resources": {"requests": {"memory": "12 GB"}}}, "/resources/requests/memory"),
        ({"resources": {"limits": {"memory": 13}}}, "/resources/limits/memory"),
        ({"resources": {"requests": {"nvidia.com/gpu": "1.5"}}}, "/resources/requests/nvidia.com~1gpu"),
        ({"shm": "2G i"}, "/shm"),
        ({"nodeSelector": None}, "missing property 'nodeSelector'"),
        ({"s3": {"region": None}}, "missing property 'region'"),
        ({"nodeSelector": ["g5.xlarge"]}, "/nodeSelector"),
        ({"tolerations": [{"operator": "Exists"}]}, "/tolerations"),
        ({"tolerations": {"gpu": {"effect": "Never"}}}, "/tolerations/gpu/effect"),
        ({"startupMinutes": 0}, "/startupMinutes"),
        ({"drainSeconds": "60"}, "/drainSeconds"),
        ({"networkPolicy": {"from": [{}]}}, "/networkPolicy/from"),
        ({"networkPolicy": {"store": []}}, "/networkPolicy/store"),
        ({"networkPolicy": {"storePorts": []}}, "/networkPolicy/storePorts"),
        ({"podDisruptionBudget": {"minAvailable": 1}}, "/podDisruptionBudget"),
        ({"serviceMonitor": {"enabled": "yes"}}, "/serviceMonitor/enabled"),
        ({"alerts": {"waiting": 0}}, "/alerts/waiting"),
        ({"alerts": {"firstTokenSeconds": "10"}}, "/alerts/firstTokenSeconds"),
        ({"alerts": {"acceptanceFloor": 3}}, "/alerts"),
        ({"dashboard": {"labels": {"grafana_dashboard": 1}}}, "/dashboard/labels"),
        ({"keda": {"enabled": True}}, "/keda"),
        ({"keda": {"maxReplicas": 1}}, "/keda/maxReplicas"),
        ({"replicaCount": 2}, "additional properties 'replicaCount'"),
    ],
    ids=str,
)
def test_nonsense_is_refused_by_name(render: Render, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(helm_python.HelmError, match="schema") as refused:
        render(changes)
    assert field in str(refused.value)


@pytest.mark.parametrize("name", ["123", "Pair", "pair.x", "x/y", "pair-", "a" * 37])
def test_a_name_that_an_object_cannot_bear_is_refused(render: Render, name: str) -> None:
    with pytest.raises(helm_python.HelmError, match="a letter first, 36 at most"):
        render(name=name)


def test_replicas_beyond_what_is_scaled_to_are_refused(render: Render) -> None:
    with pytest.raises(helm_python.HelmError, match=r"replicas: more than keda\.maxReplicas"):
        render({"replicas": 3, "keda": {"enabled": True, "prometheus": "http://prometheus", "maxReplicas": 2}})


def test_words_that_yaml_takes_for_numbers_stay_words(render: Render) -> None:
    changes = {"s3": {"secretName": "123", "region": "456"}, "apiKey": {"secretName": "true", "secretKey": "789"}}
    for mode in ("kserve", "deployment"):
        assert faults(list(render({"mode": mode, **changes}).values())) == []


def test_a_comma_in_a_bundle_s_address_is_not_two_arguments(render: Render) -> None:
    address = f"s3://bucket/a,b/bundle/{DIGEST}"
    pod = render({"mode": "deployment", "bundle": {"artifact": address}})["Deployment"]["spec"]["template"]["spec"]
    assert pod["initContainers"][0]["command"][3:] == [address, "/mnt/bundle/models"]


def test_the_chart_s_own_values_alone_serve_nothing() -> None:
    from tests.charts.conftest import CHART

    with pytest.raises(helm_python.HelmError, match="/image"):
        helm_python.Chart.load(CHART).render({})


@pytest.mark.parametrize(
    ("kind", "path", "value", "fault"),
    [
        ("InferenceService", ("predictor", "nodeSelector"), ["x"], "nodeSelector"),
        ("InferenceService", ("predictor", "automountServiceAccountToken"), True, "token"),
        ("ServingRuntime", ("containers", 0, "securityContext", "runAsNonRoot"), False, "root"),
        ("ServingRuntime", ("containers", 0, "securityContext", "capabilities"), {"add": ["NET_ADMIN"]}, "privileges"),
        ("ServingRuntime", ("containers", 0, "image"), "qdflash-vllm", "digest"),
        ("ServingRuntime", ("containers", 0, "resources", "limits"), {}, "limits"),
        ("ServingRuntime", ("containers", 0, "startupProbe", "period"), 1, "period"),
        ("ServingRuntime", ("containers", 0, "env", 0), {"name": "AWS_SECRET_ACCESS_KEY", "value": "x"}, "plain text"),
        ("NetworkPolicy", ("egress", 0, "port"), 53, "port"),
        ("PodDisruptionBudget", ("maxUnavailable",), [], "maxUnavailable"),
        ("PrometheusRule", ("groups", 0, "rules", 0, "expression"), "1", "expression"),
        ("PrometheusRule", ("groups", 0, "rules", 0, "labels", "severity"), 1, "severity"),
        ("ServiceMonitor", ("endpoints", 0, "scrapeInterval"), "15s", "scrapeInterval"),
        ("ServiceMonitor", ("selector",), None, "selector"),
        ("ScaledObject", ("triggers", 0, "metadata", "threshold"), 4, "threshold"),
        ("ScaledObject", ("advanced", "behavior"), {}, "behavior"),
    ],
)
def test_the_checks_bite(render: Render, kind: str, path: tuple, value: Any, fault: str) -> None:
    broken = render(EVERYTHING[0])[kind]
    place = broken["spec"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    found = faults([broken])
    assert any(fault in one for one in found), found
