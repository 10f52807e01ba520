"""A small typed client of vLLM's OpenAI server. A request that fails raises; it never becomes an empty answer."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from components.contract.errors import StageError, TransientError, UserError, one_line
from components.serving.metrics import Metrics, read_metrics

REQUEST_TIMEOUT_SECONDS = 1800.0
INVOCATIONS = "/invocations"


@dataclass(frozen=True)
class Completion:
    """One answer, with the token ids that the engine was fed and produced.

    ``logprobs[i]`` maps token id to natural-log probability for position ``i``: the requested number of best
    candidates, the sampled token always among them; empty when none were asked for. ``seconds`` is the wall clock of
    the whole request; ``first_token_seconds`` is known only for streamed requests. The ids are vLLM's addition to the
    OpenAI API and empty where another server leaves them out; the counts come from ``usage``.
    """

    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    prompt_tokens: int
    tokens: int
    finish_reason: str
    logprobs: list[dict[int, float]]
    seconds: float
    first_token_seconds: float | None = None
    reasoning: str | None = None


class Client:
    """Talks to one server. The API key, when there is one, comes from ``VLLM_API_KEY``.

    With ``invocations`` every prompt and conversation is posted to ``/invocations``, the hosting route that tells them
    apart by their fields; thinking is always stated, because servers of that route differ in what they do unasked.
    Requests raise :class:`StageError` with the server's message when it refuses, and :class:`TransientError` when it
    does not answer. Sampling keywords are the OpenAI API's, with vLLM's extensions (``top_k``, ``ignore_eos``, …);
    the default is greedy.
    """

    def __init__(self, url: str, model: str, invocations: bool = False) -> None:
        key = os.environ.get("VLLM_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url, self.model = url, model
        self._completions = INVOCATIONS if invocations else "/v1/completions"
        self._chat = INVOCATIONS if invocations else "/v1/chat/completions"
        self._health = "/ping" if invocations else "/health"
        self._http = httpx.Client(base_url=url, headers=headers, timeout=REQUEST_TIMEOUT_SECONDS, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def complete(
        self,
        prompt: Sequence[int] | str,
        *,
        max_tokens: int,
        logprobs: int | None = None,
        temperature: float = 0.0,
        **sampling: Any,
    ) -> Completion:
        """Continue a prompt given as token ids (or text); ``logprobs`` asks for that many candidates a position."""
        body = self._body(max_tokens, temperature, sampling)
        body["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
        if logprobs is not None:
            body["logprobs"] = logprobs
        answer, seconds = self._post(self._completions, body)
        with _understood(self.url + self._completions):
            choice = answer["choices"][0]
            given = (choice.get("logprobs") or {}).get("top_logprobs") or []
            return Completion(
                text=choice["text"],
                prompt_token_ids=choice.get("prompt_token_ids") or [],
                token_ids=choice.get("token_ids") or [],
                prompt_tokens=answer["usage"]["prompt_tokens"],
                tokens=answer["usage"]["completion_tokens"],
                finish_reason=choice["finish_reason"],
                logprobs=[{_token_id(token): value for token, value in position.items()} for position in given],
                seconds=seconds,
            )

    def continuations(self, prompt: Sequence[int], count: int, *, max_tokens: int, **sampling: Any) -> list[list[int]]:
        """Draw ``count`` continuations of one prompt in one request; return their token ids."""
        body = self._body(max_tokens, sampling.pop("temperature"), sampling)
        body.update(prompt=list(prompt), n=count)
        answer, _ = self._post(self._completions, body)
        with _understood(self.url + self._completions):
            return [choice.get("token_ids") or [] for choice in answer["choices"]]

    def chat(
        self,
        messages: list[dict[str, str]],
        *,
        max_tokens: int,
        thinking: bool = False,
        logprobs: int | None = None,
        temperature: float = 0.0,
        **sampling: Any,
    ) -> Completion:
        """Answer a conversation that the server renders with the model's own chat template."""
        body = self._body(max_tokens, temperature, sampling)
        body.update(messages=messages, chat_template_kwargs={"enable_thinking": thinking})
        if logprobs is not None:
            body.update(logprobs=True, top_logprobs=logprobs)
        answer, seconds = self._post(self._chat, body)
        with _understood(self.url + self._chat):
            choice = answer["choices"][0]
            message = choice["message"]
            given = (choice.get("logprobs") or {}).get("content") or []
            return Completion(
                text=message.get("content") or "",
                prompt_token_ids=answer.get("prompt_token_ids") or [],
                token_ids=choice.get("token_ids") or [],
                prompt_tokens=answer["usage"]["prompt_tokens"],
                tokens=answer["usage"]["completion_tokens"],
                finish_reason=choice["finish_reason"],
                logprobs=[
                    {_token_id(one["token"]): one["logprob"] for one in [*position["top_logprobs"], position]}
                    for position in given
                ],
                seconds=seconds,
                reasoning=message.get("reasoning"),
            )

    def stream(
        self, prompt: Sequence[int] | str, *, max_tokens: int, temperature: float = 0.0, **sampling: Any
    ) -> Completion:
        """Continue a prompt as :meth:`complete` does, timing the first token as well."""
        body = self._body(max_tokens, temperature, sampling)
        body.update(prompt=prompt if isinstance(prompt, str) else list(prompt), stream=True)
        body["stream_options"] = {"include_usage": True}
        text = ""
        usage: dict[str, int] = {}
        token_ids: list[int] = []
        prompt_token_ids: list[int] = []
        finish_reason, first = "", None
        started = time.perf_counter()
        try:
            with (
                self._http.stream("POST", self._completions, json=body) as response,
                _understood(self.url + self._completions),
            ):
                if response.status_code != 200:
                    response.read()
                    raise _refused(response)
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise StageError(f"{self.url}{self._completions}: {event['error']}")
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        first = first or time.perf_counter() - started
                        text += choice["text"]
                        token_ids += choice.get("token_ids") or []
                        prompt_token_ids = choice.get("prompt_token_ids") or prompt_token_ids
                        finish_reason = choice["finish_reason"] or finish_reason
        except httpx.TransportError as error:
            raise _unanswered(self.url, error) from error
        seconds = time.perf_counter() - started
        if not finish_reason:
            raise TransientError(f"{self.url}{self._completions}: the stream ended before the answer did")
        return Completion(
            text=text,
            prompt_token_ids=prompt_token_ids,
            token_ids=token_ids,
            prompt_tokens=usage.get("prompt_tokens", len(prompt_token_ids)),
            tokens=usage.get("completion_tokens", len(token_ids)),
            finish_reason=finish_reason,
            logprobs=[],
            seconds=seconds,
            first_token_seconds=first,
        )

    def models(self) -> list[dict[str, Any]]:
        """Return what ``/v1/models`` lists: ``id``, and from vLLM ``root`` and ``max_model_len``.

        Raises :class:`UserError` when what answers there is no OpenAI-compatible server.
        """
        try:
            return [{"id": str(one["id"]), **one} for one in self._get("/v1/models").json()["data"]]
        except TransientError:
            raise
        except (StageError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.url}: no OpenAI-compatible server (GET /v1/models: {one_line(error, 120)})"
            ) from error

    def tokenize(self, **asked: Any) -> list[int]:
        """Return token ids from vLLM's ``/tokenize``, of a ``prompt`` or of ``messages``."""
        answer, _ = self._post("/tokenize", {"model": self.model, **asked})
        with _understood(f"{self.url}/tokenize"):
            return answer["tokens"]

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        answer, _ = self._post("/detokenize", {"model": self.model, "tokens": list(tokens)})
        with _understood(f"{self.url}/detokenize"):
            return answer["prompt"]

    def metrics(self) -> Metrics:
        """Scrape ``/metrics``. Speculation counters are 0 (and positions empty) without a drafter."""
        try:
            return read_metrics(self._get("/metrics").text)
        except TransientError:
            raise
        except (StageError, KeyError, ValueError) as error:
            said = one_line(error, 120)
            raise UserError(
                f"{self.url}/metrics: not vLLM's; acceptance and parity need its counters ({said})"
            ) from error

    def is_idle(self) -> bool:
        """Say whether the server works on no request."""
        metrics = self.metrics()
        return metrics.running == 0 and metrics.waiting == 0

    def is_healthy(self) -> bool:
        """Say whether the server answers its health check; a server that is not up yet does not."""
        try:
            return self._http.get(self._health, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _body(self, max_tokens: int, temperature: float, sampling: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **sampling,
        }

    def _post(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
        started = time.perf_counter()
        try:
            response = self._http.post(path, json=body)
        except httpx.TransportError as error:
            raise _unanswered(self.url + path, error) from error
        seconds = time.perf_counter() - started
        if response.status_code != 200:
            raise _refused(response)
        with _understood(self.url + path):
            return response.json(), seconds

    def _get(self, path: str) -> httpx.Response:
        try:
            response = self._http.get(path)
        except httpx.TransportError as error:
            raise _unanswered(self.url + path, error) from error
        if response.status_code != 200:
            raise _refused(response)
        return response


def _token_id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


@contextmanager
def _understood(url: str) -> Iterator[None]:
    """Turn an answer that is not of the API's form into one line that names who gave it."""
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        said = one_line(error, 120)
        raise StageError(f"{url}: the answer is not of the OpenAI API's form ({said})") from error


def _refused(response: httpx.Response) -> StageError:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text
    return StageError(f"{response.request.url}: status {response.status_code}: {message[:300]}")


def _unanswered(url: str, error: Exception) -> TransientError:
    return TransientError(f"{url}: no answer from the server ({type(error).__name__}: {error}); is it still running?")
