"""What deploying asks a service, asked of a real server under speculation; no cluster is between them."""

import contextlib
import http.client
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from components.contract.errors import GateError
from components.measure.answers import ask_alone
from components.store.artifact import Artifact
from components.store.backend import Store
from pipelines.deployment.evidence import Evidence
from pipelines.deployment.smoke import Caller, smoke

pytestmark = pytest.mark.slow


class Direct:
    """Stands for a namespace: a connection to any pod goes to the server."""

    def __init__(self, url: str) -> None:
        self._at = urlsplit(url).netloc

    @contextlib.contextmanager
    def connection(self, pod: str, port: int) -> Iterator[http.client.HTTPConnection]:
        made = http.client.HTTPConnection(self._at)
        yield made
        made.close()


def evidence(prompts: list[dict[str, Any]], floor: float) -> Evidence:
    expected = 1 + sum(sum(one["accepted"]) for one in prompts) / sum(one["drafts"] for one in prompts)
    return Evidence(Artifact(Store("/nowhere"), "bundle", "a" * 64, {}), {}, prompts, expected, expected * floor)


def test_a_server_serves_as_it_was_measured(server) -> None:
    asked = [{"prompt_token_ids": [10, 11, first]} for first in range(20, 24)]
    prompts = [one | ask_alone(server.client, one, 24) for one in asked]
    said: list[str] = []
    smoke(Direct(server.url), "pod", 8080, measured := evidence(prompts, 1.0), said.append, lambda: None)
    drafts = sum(one["drafts"] for one in prompts)
    assert (
        said[-1]
        == f"smoke test: acceptance length {measured.expected:.2f} (at least {measured.floor:.2f}), {drafts} drafts"
    )
    with pytest.raises(GateError, match="is below"):
        smoke(Direct(server.url), "pod", 8080, evidence(prompts, 1.01), said.append, lambda: None)


def test_every_counter_moves(server) -> None:
    ask = Caller(Direct(server.url), "pod", 8080)
    before = ask.counters()
    ask(
        "/v1/completions", {"model": server.client.model, "prompt": [10, 11, 12], "max_tokens": 24, "ignore_eos": True}
    )
    counted = vars(ask.counters() - before)
    assert counted.pop("errors") == 0
    assert (counted["requests"], counted["first_tokens"]) == (1, 1)
    assert {name: value for name, value in counted.items() if not value} in ({}, {"accepted": 0})
