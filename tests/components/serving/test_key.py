"""Every route of vLLM's own application, without the key and with it."""

import re

import pytest

from components.contract.errors import UserError
from components.serving.key import OPEN, KeyOnEveryRoute

KEY = "open-sesame"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def application():
    """Build vLLM's application with the middleware as ``vllm serve`` does; no engine is behind it."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def build(*arguments: str):
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(["model", *arguments])
        app = build_app(args, ("generate",))
        app.middleware_stack = app.build_middleware_stack()
        return app

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        yield {
            "vllm": build(),
            "ours": build("--middleware", f"{KeyOnEveryRoute.__module__}.{KeyOnEveryRoute.__name__}"),
        }


def client(app):
    from starlette.testclient import TestClient

    return TestClient(app, raise_server_exceptions=False)


def requests(app) -> list[tuple[str, str]]:
    return [
        (method, re.sub(r"{[^}]*}", "x", route.path))
        for route in app.routes
        for method in sorted(getattr(route, "methods", None) or {"GET"})
    ]


def test_no_route_but_two_answers_without_the_key(application) -> None:
    found = requests(application["ours"])
    assert {"/v1/chat/completions", "/invocations", "/tokenize", "/health", "/metrics"} <= {path for _, path in found}
    caller = client(application["ours"])
    for method, path in [*found, ("POST", "/health/"), ("POST", "//invocations"), ("GET", "/nothing")]:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}):
            status = caller.request(method, path, headers=headers).status_code
            assert (status == 401) is (path not in OPEN), (method, path, status)


def test_a_socket_is_not_opened_without_the_key(application) -> None:
    from starlette.testclient import WebSocketDenialResponse

    caller = client(application["ours"])
    with pytest.raises(WebSocketDenialResponse) as denied, caller.websocket_connect("/v1/realtime"):
        pass
    assert denied.value.status_code == 401


def test_with_the_key_every_route_is_reached(application) -> None:
    caller = client(application["ours"])
    for path in ("/v1/chat/completions", "/invocations", "/tokenize"):
        answer = caller.post(path, headers={"Authorization": f"Bearer {KEY}"}, content=b"{")
        assert answer.status_code not in (401, 404), path


def test_vllm_s_own_check_leaves_routes_open(application) -> None:
    """Once this fails, vLLM guards them itself and the middleware can go."""
    caller = client(application["vllm"])
    assert caller.post("/v1/chat/completions", content=b"{").status_code == 401
    assert caller.post("/invocations", content=b"{").status_code != 401
    assert caller.post("/tokenize", content=b"{").status_code != 401


def test_a_server_without_a_key_does_not_start(monkeypatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(UserError, match="VLLM_API_KEY: not set"):
        KeyOnEveryRoute(None)
