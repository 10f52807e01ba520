"""The chart's dashboard and alerts on a real Prometheus that scrapes a real server under speculation."""

import json
import math
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pipelines.interpreters import interpreter
from tests.debian import tool

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
RENDER = """
import json, sys, helm_python
values = json.load(sys.stdin)
files = helm_python.Chart.load(sys.argv[1]).render(values, name="pair", namespace="serving")
print(json.dumps({path.rpartition("/")[2]: text for path, text in files.items()}))
"""
VALUES = {
    "image": f"registry.example/qdflash-vllm@sha256:{'b' * 64}",
    "bundle": {
        "artifact": f"s3://bucket/runs/bundle/{'a' * 64}",
        "uri": f"s3://bucket/runs/bundle/{'a' * 64}/0/",
        "sums": "c" * 64,
        "acceptanceFloor": 3.0,
    },
    "serving": {"port": 8080, "args": ["serve", "/mnt/models"], "env": {}},
    "alerts": {"enabled": True},
    "dashboard": {"enabled": True},
}
SERIES = {"namespace": "serving", "pod": "pair-predictor-7d4f9c5b6d-x2x4z"}
VARIABLES = {"$namespace": SERIES["namespace"], "$pod": SERIES["pod"], "$__rate_interval": "20s"}
OF_THE_CLUSTER = {"kube_pod_container_status_restarts_total"}


@pytest.fixture(scope="module")
def chart() -> dict[str, Any]:
    """The rules and the dashboard that the chart renders."""
    argv = [interpreter("core"), "-c", RENDER, str(ROOT / "charts" / "qdflash")]
    done = subprocess.run(argv, input=json.dumps(VALUES), capture_output=True, text=True, check=True)
    files = json.loads(done.stdout)
    dashboard = json.loads(yaml.safe_load(files["configmap.yaml"])["data"]["qdflash.json"])
    return {"rules": yaml.safe_load(files["prometheusrule.yaml"])["spec"], "panels": dashboard["panels"]}


@pytest.fixture(scope="module")
def prometheus(server, chart, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus with the chart's rules that scrapes the server every two seconds: its address."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "rules.yaml").write_text(yaml.safe_dump(chart["rules"]))
    target = {"targets": [server.url.removeprefix("http://")], "labels": SERIES}
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "vllm", "static_configs": [target]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    argv = [tool("prometheus", "prometheus"), f"--config.file={folder / 'prometheus.yaml'}"]
    argv += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    yield f"http://{address}"
    process.kill()
    process.wait()


def ready(prometheus: str) -> bool:
    try:
        return httpx.get(f"{prometheus}/-/ready", trust_env=False).is_success
    except httpx.TransportError:
        return False


def ask(prometheus: str, query: str) -> list[float]:
    found = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}, trust_env=False).json()
    assert found["status"] == "success", found
    return [float(one["value"][1]) for one in found["data"]["result"]]


def settled(prometheus: str, query: str) -> list[float]:
    """Ask until there are values and each is a number: on a busy machine a scrape can be late."""
    until = time.monotonic() + 10
    while not (values := ask(prometheus, query)) or not all(map(math.isfinite, values)):
        assert time.monotonic() < until, (query, values)
        time.sleep(0.5)
    return values


def test_every_panel_and_every_rule_finds_its_series(server, prometheus: str, chart) -> None:
    while not ready(prometheus) or ask(prometheus, "up") != [1]:
        time.sleep(0.2)
    before, until = server.client.metrics(), time.monotonic() + 6
    while time.monotonic() < until:
        server.client.complete([10, 11, 12], max_tokens=24, ignore_eos=True)
    time.sleep(3.5)  # once more scraped and once more evaluated
    queries = {target["expr"]: panel["title"] for panel in chart["panels"] for target in panel["targets"]}
    for query in queries:
        if names(query) <= OF_THE_CLUSTER:
            continue
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        settled(prometheus, query)
    delta = server.client.metrics() - before
    length = next(query for query, panel in queries.items() if panel == "Acceptance length")
    for name, value in {**VARIABLES, "$__rate_interval": "8s"}.items():
        length = length.replace(name, value)
    assert ask(prometheus, length)[0] == pytest.approx(delta.acceptance_length, abs=0.05)

    rules = httpx.get(f"{prometheus}/api/v1/rules", trust_env=False).json()["data"]["groups"][0]["rules"]
    assert len(rules) == len(chart["rules"]["groups"][0]["rules"]) == 10
    assert {rule["health"] for rule in rules} == {"ok"}, rules


def test_every_name_in_the_rules_is_on_the_server_s_page(server, chart) -> None:
    page = httpx.get(f"{server.url}/metrics", trust_env=False).text
    used = set().union(*(names(rule["expr"]) for rule in chart["rules"]["groups"][0]["rules"]))
    assert {"vllm:spec_decode_num_drafts_total", "vllm:kv_cache_usage_perc", "http_requests_total"} <= used
    for name in used - OF_THE_CLUSTER - {"up"}:
        assert re.search(rf"^{name}\{{", page, re.MULTILINE), name


def names(query: str) -> set[str]:
    """Return the metrics of a query: what stands before a brace."""
    return set(re.findall(r"([a-z][a-z_:]+)\{", query))
