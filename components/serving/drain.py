"""``python -m components.serving.drain --port N --seconds S``: what a pod does before SIGTERM, so that nothing is cut.

vLLM finishes what runs when it is told to stop (``--shutdown-timeout``), but answers what still arrives meanwhile with
status 200 and no token; and with long answers under way its server was seen to hang, six of them never answered, until
it was killed. Connections that a gateway keeps open bring requests even after the pod has left its Service. So first
the pod goes on as if nothing were, while endpoints forget it; then the server, which has :class:`RefuseWhileDraining`
as ``--middleware``, refuses what is new, and what it took before is waited for, ``S`` seconds at most.
"""

import argparse
import http.client
import os
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from components.serving import ready

ENDPOINTS_SECONDS, ARRIVAL_SECONDS, POLL_SECONDS = 5.0, 1.0, 0.5
UNDER_WAY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
OPEN = frozenset({"/health", "/metrics"})


def mark() -> Path:
    """Return the file that says so; the server's container and its preStop hook share it."""
    return Path.home() / "qdflash-draining"


class RefuseWhileDraining:
    """Answer 503 to every request that arrives once the mark is there, but for probes and Prometheus."""

    def __init__(self, app: Any) -> None:
        self._app, self._mark = app, os.fspath(mark())

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        """Pass the request on, or refuse it and close the connection."""
        if scope["type"] == "http" and scope["path"] not in OPEN and os.path.exists(self._mark):
            from starlette.responses import JSONResponse

            fault = {"message": "this server is stopping; ask again", "type": "ServiceUnavailableError", "code": 503}
            headers = {"Connection": "close", "Retry-After": "1"}
            return JSONResponse({"error": fault}, status_code=503, headers=headers)(scope, receive, send)
        return self._app(scope, receive, send)


def main() -> None:
    """Let endpoints forget the pod, refuse what is new, and wait for what runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True, help="where the server listens, on loopback")
    parser.add_argument("--seconds", type=float, required=True, help="how long requests under way may take")
    asked = parser.parse_args()
    time.sleep(ENDPOINTS_SECONDS)
    mark().touch()
    time.sleep(ARRIVAL_SECONDS)
    deadline, idle = time.monotonic() + asked.seconds, 0
    while idle < 2 and time.monotonic() < deadline:
        idle = 0 if is_busy(asked.port) else idle + 1
        time.sleep(POLL_SECONDS)


def is_busy(port: int) -> bool:
    """Say whether the engine has requests; a server that is gone has none, one that does not answer may."""
    try:
        return ready.total(port, *UNDER_WAY) > 0
    except ConnectionRefusedError:
        return False
    except (OSError, http.client.HTTPException):
        return True


if __name__ == "__main__":
    main()
