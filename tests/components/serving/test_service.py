"""The chart's container on a real server: clients of every kind, an engine that is killed, a pod that is deleted."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import service_stress
from service_traffic import CHAT, COMPLETIONS, HEADERS, KEY, Traffic, bad, drained, prompts, quiet

from components.serving.key import OPEN
from components.serving.lifetime import ENGINE_DIED

pytestmark = pytest.mark.slow


def test_good_ones_are_right_bad_ones_refused_a_dead_engine_is_restarted_and_nothing_is_cut(tmp_path: Path) -> None:
    with service_stress.served(tmp_path, drain=20) as (kubelet, client):
        known = quiet(client, prompts(7, count=13, longest=20))
        rows = {row["metric"]: row for row in service_stress.stressed(kubelet, client, known, requests=90, slow=12)}
        assert (rows["crashes"]["value"], rows["wrong_answers"]["value"]) == (0, 0)
        assert rows["requests"]["value"] == 90
        assert rows["near_ties"]["value"] <= 9
        every_route_asks_for_the_key(client.url)
        os.kill(service_stress.engine(kubelet.pid), signal.SIGKILL)
        how, seconds = kubelet.until_restarted()
        assert how == f"ended {ENGINE_DIED}"
        assert seconds < 30
        kubelet.until_ready()
        long = quiet(client, prompts(11, count=4, longest=440, shortest=400))
        found, traffic = asyncio.run(drained(kubelet.terminate, Traffic(client.url, [*known, *long])))
    assert (found["code"], found["cut"], traffic.wrong) == (0, 0, [])
    assert found["late"] > 0
    log = (tmp_path / "log").read_text()
    assert "files agree with the checksums of the deployment" in log
    assert KEY not in log
    assert found["refused"] > 0
    assert found["requests"] > 2 * found["refused"]


def every_route_asks_for_the_key(url: str) -> None:
    with httpx.Client(base_url=url, trust_env=False) as stranger:
        paths = stranger.get("/openapi.json", headers=HEADERS).json()["paths"]
        assert {COMPLETIONS, CHAT, "/invocations", "/tokenize", "/v1/models", "/health", "/metrics"} <= set(paths)
        hidden = {"/openapi.json": ["get"], "/docs": ["get"], "/nothing": ["get", "post"], "//invocations": ["post"]}
        for path, methods in {**paths, **hidden}.items():
            for method in methods:
                for headers in ({}, {"Authorization": "Bearer wrong"}):
                    status = stranger.request(method, path, headers=headers).status_code
                    assert (status == 401) is (path not in OPEN), (method, path, status)


def test_the_judge_bites() -> None:
    """An answer cut short, one altered and a refusal without a reason are told from right ones and from near-ties."""
    answer = {"token_ids": [4, 5, 6], "top": [{4: -0.1, 9: -3.0}, {5: -0.7, 8: -0.75}, {6: -0.1, 7: -2.0}]}
    traffic = Traffic("http://127.0.0.1:9", [({}, answer)])
    traffic.compare("whole", 0, [4, 5, 6])
    assert (traffic.found.wrong, traffic.found.ties) == ([], 0)
    traffic.compare("whole", 0, [4, 8, 1])
    assert (traffic.found.wrong, traffic.found.ties) == ([], 1)
    for given in ([4, 5], [], [9, 5, 6], [4, 5, 7], [4, 5, 6, 6]):
        traffic.compare("whole", 0, given)
    assert len(traffic.found.wrong) == 5
    assert len({bad(kind, number) for kind in ("malformed", "oversize", "bad UTF-8") for number in range(2)}) > 3
