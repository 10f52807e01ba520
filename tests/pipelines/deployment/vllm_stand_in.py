"""A stand-in for vLLM's HTTP routes, for the core role, which has no vLLM: one model, counters of speculation.

It generates nothing: answers are canned, and each request counts as many drafts and accepted tokens as it is told.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests import loopback

PAGE = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{model_name="pair"}} {drafts}
vllm:spec_decode_num_accepted_tokens_total{{model_name="pair"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="pair",position="0"}} {accepted}
vllm:request_success_total{{finished_reason="stop",model_name="pair"}} {requests}
vllm:request_success_total{{finished_reason="length",model_name="pair"}} 0.0
vllm:time_to_first_token_seconds_bucket{{le="+Inf",model_name="pair"}} {requests}
vllm:time_to_first_token_seconds_count{{model_name="pair"}} {requests}
vllm:time_to_first_token_seconds_sum{{model_name="pair"}} {first_token_seconds}
vllm:inter_token_latency_seconds_count{{model_name="pair"}} {drafts}
vllm:inter_token_latency_seconds_sum{{model_name="pair"}} {token_seconds}
http_requests_total{{handler="/v1/completions",method="POST",status="2xx"}} {requests}
http_requests_total{{handler="/v1/completions",method="POST",status="5xx"}} {errors}
"""


@dataclass
class Server:
    """What it counts, and how it answers: accepted tokens a draft, the key it asks for, the text of an answer."""

    address: tuple[str, int]
    per_draft: float = 2.0
    drafts_a_token: float = 0.5
    key: str | None = None
    page: str | None = None
    text: str = "Paris is the capital of France."
    drafts: float = 0
    accepted: float = 0
    requests: float = 0
    errors: float = 0
    first_token_seconds: float = 0
    token_seconds: float = 0
    asked: list[tuple[str, Any]] = field(default_factory=list)


@contextmanager
def serving() -> Iterator[Server]:
    """Serve on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        wbufsize = -1

        def do_GET(self) -> None:
            if self.path == "/metrics":
                page = PAGE.format(**vars(state))
                return self._send(200, page)
            return self._send(200, state.page or {"object": "list", "data": [{"id": "pair"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if state.key and self.headers.get("Authorization") != f"Bearer {state.key}":
                return self._send(401, {"error": "Unauthorized"})
            state.asked.append((self.path, body))
            drafts = body["max_tokens"] * state.drafts_a_token
            state.drafts += drafts
            state.accepted += drafts * state.per_draft
            if body.get("stream"):
                words = [{"choices": [{"delta": {"content": word}}]} for word in state.text.split()]
                return self._send(200, "".join(f"data: {json.dumps(one)}\n\n" for one in words) + "data: [DONE]\n\n")
            if self.path == "/v1/completions":
                return self._send(200, {"choices": [{"text": state.text}]})
            return self._send(200, {"choices": [{"message": {"content": state.text}}]})

        def _send(self, status: int, document: Any) -> None:
            data = document.encode() if isinstance(document, str) else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with loopback.serving(Handler) as (server, _):
        state = Server(("127.0.0.1", server.server_port))
        yield state
