"""A small typed client of vLLM's OpenAI server. A request that fails raises; it never becomes an empty answer."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from components.contract.errors import StageError, TransientError

REQUEST_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class Completion:
    """One answer, with the token ids that the engine was fed and produced.

    ``logprobs[i]`` maps token id to natural-log probability for position ``i``: the requested number of best
    candidates, the sampled token always among them; empty when none were asked for. ``seconds`` is the wall clock of
    the whole request; ``first_token_seconds`` is known only for streamed requests.
    """

    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    logprobs: list[dict[int, float]]
    seconds: float
    first_token_seconds: float | None = None
    reasoning: str | None = None


@dataclass(frozen=True)
class Metrics:
    """The server's counters at one moment; subtract two moments to get what lies between."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    generation_tokens: int
    running: int
    waiting: int

    def __sub__(self, earlier: "Metrics") -> "Metrics":
        """Return the counters' difference; ``running`` and ``waiting`` stay those of the later moment."""
        return Metrics(
            drafts=self.drafts - earlier.drafts,
            draft_tokens=self.draft_tokens - earlier.draft_tokens,
            accepted_tokens=self.accepted_tokens - earlier.accepted_tokens,
            accepted_per_position=tuple(
                now - before
                for now, before in zip(self.accepted_per_position, earlier.accepted_per_position, strict=True)
            ),
            generation_tokens=self.generation_tokens - earlier.generation_tokens,
            running=self.running,
            waiting=self.waiting,
        )

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens a step: 1 + accepted / drafts (the bonus token included); None without drafts."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None


class Client:
    """Talks to one server. The API key, when there is one, comes from ``VLLM_API_KEY``.

    Requests raise :class:`StageError` with the server's message when it refuses, and :class:`TransientError` when it
    does not answer. Sampling keywords are the OpenAI API's, with vLLM's extensions (``top_k``, ``ignore_eos``, …);
    the default is greedy.
    """

    def __init__(self, url: str, model: str) -> None:
        key = os.environ.get("VLLM_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url, self.model = url, model
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
        answer, seconds = self._post("/v1/completions", body)
        choice = answer["choices"][0]
        given = (choice.get("logprobs") or {}).get("top_logprobs") or []
        return Completion(
            text=choice["text"],
            prompt_token_ids=choice["prompt_token_ids"],
            token_ids=choice["token_ids"],
            finish_reason=choice["finish_reason"],
            logprobs=[{_token_id(token): value for token, value in position.items()} for position in given],
            seconds=seconds,
        )

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
        answer, seconds = self._post("/v1/chat/completions", body)
        choice = answer["choices"][0]
        message = choice["message"]
        given = (choice.get("logprobs") or {}).get("content") or []
        return Completion(
            text=message.get("content") or "",
            prompt_token_ids=answer["prompt_token_ids"],
            token_ids=choice["token_ids"],
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
        text = ""
        token_ids: list[int] = []
        prompt_token_ids: list[int] = []
        finish_reason, first = "", None
        started = time.perf_counter()
        try:
            with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refused(response)
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise StageError(f"{self.url}/v1/completions: {event['error']}")
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
            raise TransientError(f"{self.url}/v1/completions: the stream ended before the answer did")
        return Completion(text, prompt_token_ids, token_ids, finish_reason, [], seconds, first)

    def metrics(self) -> Metrics:
        """Scrape ``/metrics``. Speculation counters are 0 (and positions empty) without a drafter."""
        totals: dict[str, float] = {}
        positions: dict[int, float] = {}
        for family in text_string_to_metric_families(self._get("/metrics").text):
            for sample in family.samples:
                if sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                    position = int(sample.labels["position"])
                    positions[position] = positions.get(position, 0) + sample.value
                else:
                    totals[sample.name] = totals.get(sample.name, 0) + sample.value
        return Metrics(
            drafts=int(totals.get("vllm:spec_decode_num_drafts_total", 0)),
            draft_tokens=int(totals.get("vllm:spec_decode_num_draft_tokens_total", 0)),
            accepted_tokens=int(totals.get("vllm:spec_decode_num_accepted_tokens_total", 0)),
            accepted_per_position=tuple(int(positions[position]) for position in sorted(positions)),
            generation_tokens=int(totals["vllm:generation_tokens_total"]),
            running=int(totals["vllm:num_requests_running"]),
            waiting=int(totals["vllm:num_requests_waiting"]),
        )

    def is_idle(self) -> bool:
        """Say whether the server works on no request."""
        metrics = self.metrics()
        return metrics.running == 0 and metrics.waiting == 0

    def is_healthy(self) -> bool:
        """Say whether the server answers its health check; a server that is not up yet does not."""
        try:
            return self._http.get("/health", timeout=5).status_code == 200
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


def _refused(response: httpx.Response) -> StageError:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text
    return StageError(f"{response.request.url}: status {response.status_code}: {message[:300]}")


def _unanswered(url: str, error: Exception) -> TransientError:
    return TransientError(f"{url}: no answer from the server ({type(error).__name__}: {error}); is it still running?")
