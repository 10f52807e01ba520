"""``python -m components.serving.drain``: what a pod does before SIGTERM, so that no request is cut and none is lost.

vLLM finishes what runs when it is told to stop (``--shutdown-timeout``), but answers what still arrives meanwhile with
status 200 and no token. Connections that a gateway keeps open bring requests even after the pod has left its Service.
So first the pod goes on as if nothing were, while endpoints forget it; then the server, which has
:class:`RefuseWhileDraining` as ``--middleware``, refuses what is new, and what it took before reaches the engine.
"""

import os
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

ENDPOINTS_SECONDS, ARRIVAL_SECONDS = 5.0, 1.0
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


if __name__ == "__main__":
    time.sleep(ENDPOINTS_SECONDS)
    mark().touch()
    time.sleep(ARRIVAL_SECONDS)
