"""Call the service as a client would, through a forwarded port: a chat, a stream, and the drafts behind them."""

import http.client
import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from components.contract.errors import GateError, TransientError, UserError, one_line
from pipelines.deployment.counters import Window, read

if TYPE_CHECKING:
    from pipelines.deployment.api import Namespace
    from pipelines.deployment.evidence import Evidence

SETTLE_SECONDS = 0.5
QUESTION = "What is the capital of France? Answer in one sentence."


def smoke(
    namespace: "Namespace",
    pod: str,
    port: int,
    evidence: "Evidence",
    say: Callable[[str], None],
    tick: Callable[[], None],
) -> None:
    """Raise :class:`GateError` when the service does not serve the pair as it was measured.

    A chat and a stream must answer; then the prompts of the measurement are asked again, as many tokens each, and the
    counters of speculation must show drafts and an acceptance length of at least the bundle's floor on these prompts.
    Other requests meanwhile count too. ``tick`` is called between them. The client's key is ``VLLM_API_KEY``.
    """
    try:
        _ask(Caller(namespace, pod, port), evidence, say, tick)
    except (ValueError, LookupError, TypeError) as error:
        raise GateError(f"smoke test: the server does not answer as vLLM does ({one_line(error, 120)})") from error


def _ask(ask: "Caller", evidence: "Evidence", say: Callable[[str], None], tick: Callable[[], None]) -> None:
    model = ask("/v1/models")["data"][0]["id"]
    chat = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 32, "temperature": 0}
    before = ask.counters()
    message = ask("/v1/chat/completions", chat)["choices"][0]["message"]
    answer = message.get("content") or message.get("reasoning") or ""
    if not answer.strip():
        raise GateError("smoke test: the answer to a chat is empty")
    say(f"smoke test: {QUESTION} {' '.join(answer.split())[:80]}")
    pieces = ask.stream("/v1/chat/completions", chat | {"stream": True})
    if pieces < 2:
        raise GateError(f"smoke test: a stream came in {pieces} pieces")
    if evidence.floor is not None:
        before = ask.counters()
        for prompt in evidence.prompts:
            tokens = {"prompt": prompt["prompt_token_ids"], "max_tokens": len(prompt["token_ids"]), "temperature": 0}
            ask("/v1/completions", {"model": model, **tokens})
            tick()
    counted = ask.counters() - before
    if not counted.drafts:
        raise GateError("smoke test: the server drafted nothing; it serves without its drafter")
    found = counted.acceptance_length
    if evidence.floor is not None and found < evidence.floor:
        raise GateError(
            f"smoke test: acceptance length {found:.2f} on {len(evidence.prompts)} prompts of the measurement is "
            f"below {evidence.floor:.2f}; {evidence.expected:.2f} was measured on them"
        )
    bound = "none measured" if evidence.floor is None else f"at least {evidence.floor:.2f}"
    say(f"smoke test: acceptance length {found:.2f} ({bound}), {counted.drafts:.0f} drafts")


class Caller:
    """Requests to one pod; each has a forwarded connection of its own."""

    def __init__(self, namespace: "Namespace", pod: str, port: int) -> None:
        key = os.environ.get("VLLM_API_KEY")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._namespace, self._pod, self._port = namespace, pod, port

    def __call__(self, path: str, body: Any = None) -> Any:
        """Return the JSON that a route answers; raises :class:`GateError` when it refuses."""
        return json.loads(self._request(path, body))

    def stream(self, path: str, body: Any) -> int:
        """Return how many events with text a stream has."""
        events = [line[6:] for line in self._request(path, body).splitlines() if line.startswith("data: ")]
        if not events or events[-1] != "[DONE]":
            raise GateError("a stream did not end")
        deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
        return sum(bool(one.get("content") or one.get("reasoning")) for one in deltas)

    def counters(self) -> Window:
        """Return what the server has counted since its start; the counters trail the answers a little."""
        time.sleep(SETTLE_SECONDS)
        try:
            return read(self._request("/metrics"))
        except ValueError as error:
            raise GateError(f"pod {self._pod}: /metrics is no page of counters ({one_line(error, 120)})") from error

    def _request(self, path: str, body: Any = None) -> str:
        try:
            with self._namespace.connection(self._pod, self._port) as connection:
                data = None if body is None else json.dumps(body)
                connection.request("GET" if body is None else "POST", path, data, self._headers)
                response = connection.getresponse()
                text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise TransientError(f"pod {self._pod}: {path}: no answer ({type(error).__name__}: {error})") from error
        if response.status == 401:
            raise UserError(f"pod {self._pod}: {path} asks for a key; set VLLM_API_KEY to the one in the Secret")
        if response.status != 200:
            raise GateError(f"pod {self._pod}: {path} answered {response.status}: {' '.join(text.split())[:200]}")
        return text
