"""The API key on every route, for ``vllm serve --middleware components.serving.key.KeyOnEveryRoute``.

vLLM asks for the key under ``/v1`` alone: ``/invocations``, which generates, and ``/tokenize`` answer anyone.
"""

import os
from collections.abc import Awaitable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from components.contract.errors import UserError

OPEN = frozenset({"/health", "/metrics"})


class KeyOnEveryRoute(AuthenticationMiddleware):
    """Answer 401 to a request without the bearer token ``VLLM_API_KEY``, but for probes and Prometheus.

    Preflight requests (OPTIONS) carry no token, and pass as they do in vLLM. Raises :class:`UserError` without a key.
    """

    def __init__(self, app: Any) -> None:
        key = os.environ.get("VLLM_API_KEY")
        if not key:
            raise UserError("VLLM_API_KEY: not set; give the server its key or leave the middleware out")
        super().__init__(app, [key])

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        """Pass the request on, or refuse it."""
        guarded = scope["type"] in ("http", "websocket") and scope.get("method") != "OPTIONS"
        if guarded and scope["path"] not in OPEN and not self.verify_token(Headers(scope=scope)):
            return JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
        return self.app(scope, receive, send)
