"""Clients of a server: good ones, bad ones, slow ones and such as go away; and what each of them is answered."""

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from components.measure.parity import TIE_NATS, first_difference
from components.serving.client import Client

CONCURRENCY, LONGEST = 32, 512
IDLE_SECONDS = 1  # vLLM closes a connection that was idle for 5: a request sent at that very moment breaks off
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL = "qdflash"
KEY = "open-sesame"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
GOOD, BAD = ("whole", "streamed"), ("malformed", "oversize", "wrong model", "bad UTF-8", "negative max_tokens")
KINDS = (*GOOD, *GOOD, *GOOD, "disconnect", "disconnect", *BAD)


Asked = list[tuple[dict[str, Any], dict[str, Any]]]
"""Bodies of good requests, each with the quiet server's answer."""


@dataclass
class Found:
    """What became of the requests."""

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    ties: int = 0
    rss: list[tuple[int, float]] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """How many have been judged."""
        return sum(self.kinds.values())


def prompts(seed: int, count: int = 24, longest: int = 48, shortest: int = 4) -> list[dict[str, Any]]:
    """Return bodies of good requests: ids within the vocabulary, answers of ``shortest`` to ``longest`` tokens."""
    draw = random.Random(seed)
    return [
        {
            "model": MODEL,
            "prompt": [draw.randrange(4, 320) for _ in range(draw.randrange(1, 60))],
            "max_tokens": draw.randint(shortest, longest),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logprobs": 2,
        }
        for _ in range(count)
    ]


def quiet(client: Client, bodies: list[dict[str, Any]]) -> Asked:
    """Ask each body alone; an answer is its ``token_ids`` and, per token, the ``top`` two ids with their logprobs."""
    found = []
    for body in bodies:
        asked = {name: value for name, value in body.items() if name not in ("model", "prompt", "max_tokens")}
        answer = client.complete(body["prompt"], max_tokens=body["max_tokens"], **asked)
        found.append((body, {"token_ids": answer.token_ids, "top": answer.logprobs}))
    return found


def bad(kind: str, number: int) -> tuple[str, bytes]:
    """Return path and body of a request that no server may accept."""
    fine = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "?"}], "max_tokens": 4}
    path, body = ((COMPLETIONS, fine), (CHAT, chat))[number % 2]
    match kind:
        case "malformed":
            return path, json.dumps(body).encode()[: -1 - number % 9]
        case "oversize":
            return COMPLETIONS, json.dumps({**fine, "prompt": [5] * (LONGEST + 1 + number)}).encode()
        case "wrong model":
            return path, json.dumps({**body, "model": f"model-{number}"}).encode()
        case "bad UTF-8":
            return CHAT, json.dumps(chat).encode().replace(b"?", b"\xc3\x28\xff")
        case _:
            return path, json.dumps({**body, "max_tokens": -1 - number}).encode()


class Traffic:
    """Clients of one server, who ask what is ``known``."""

    def __init__(self, url: str, known: Asked) -> None:
        self.url, self.known = url, known
        self.found = Found()

    async def run(self, requests: int, slow: int, rss_mb: Callable[[], float]) -> None:
        """Send ``requests`` of every kind, ``CONCURRENCY`` at a time, ``slow`` of them read slowly beside those."""
        numbers = iter(range(requests - slow))
        limits = httpx.Limits(max_connections=CONCURRENCY, keepalive_expiry=IDLE_SECONDS)
        async with httpx.AsyncClient(
            base_url=self.url, headers=HEADERS, timeout=300, limits=limits, trust_env=False
        ) as http:

            async def worker() -> None:
                for number in numbers:
                    kind = KINDS[number % len(KINDS)]
                    try:
                        await self.one(http, kind, number)
                    except httpx.HTTPError as error:
                        self.found.wrong.append(f"{kind}: {error!r}")
                    if self.found.requests % 50 == 0:
                        self.found.rss.append((self.found.requests, rss_mb()))

            workers = [asyncio.create_task(worker()) for _ in range(CONCURRENCY)]
            readers = [asyncio.create_task(self.slow(number)) for number in range(slow)]
            await asyncio.gather(*workers, *readers)

    async def one(self, http: httpx.AsyncClient, kind: str, number: int) -> None:
        """Send one request of a kind and judge what comes back."""
        at = number % len(self.known)
        body, _ = self.known[at]
        if kind in GOOD:
            self.judge(kind, at, await self.ask(http, at, streamed=kind == "streamed"))
        elif kind == "disconnect":
            async with httpx.AsyncClient(base_url=self.url, headers=HEADERS, verify=False, trust_env=False) as own:
                await leave(own, body, streamed=number % 2 == 1)
        else:
            path, content = bad(kind, number)
            response = await http.post(path, content=content)
            if not 400 <= response.status_code < 500 or not reason(response):
                self.found.wrong.append(f"{kind}: {response.status_code} {response.text[:200]}")
        self.found.kinds[kind] += 1

    async def slow(self, number: int) -> None:
        """Read an answer through a small window, a little at a time."""
        at = number % len(self.known)
        content = json.dumps({**self.known[at][0], "stream": True}).encode()
        address = httpx.URL(self.url)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (address.host, address.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
        about = {"Host": "x", **HEADERS, "Content-Length": len(content)}
        head = "".join(f"{name}: {value}\r\n" for name, value in about.items())
        writer.write(f"POST {COMPLETIONS} HTTP/1.0\r\n{head}\r\n".encode() + content)
        got = b""
        while piece := await reader.read(512):
            got += piece
            await asyncio.sleep(0.05)
        writer.close()
        self.compare("slow reader", at, tokens(got.decode().splitlines()))
        self.found.kinds["slow reader"] += 1

    async def ask(self, http: httpx.AsyncClient, at: int, streamed: bool) -> httpx.Response:
        """Send a good request and read its answer to the end."""
        body = {**self.known[at][0], "stream": streamed}
        async with http.stream("POST", COMPLETIONS, json=body) as response:
            await response.aread()
        return response

    def judge(self, kind: str, at: int, response: httpx.Response) -> None:
        """Compare an answer; one that is none is wrong."""
        if response.status_code == 200 and response.headers["Content-Type"].startswith("text/event-stream"):
            self.compare(kind, at, tokens(response.text.split("\n")))
        elif response.status_code == 200:
            self.compare(kind, at, response.json()["choices"][0]["token_ids"])
        else:
            self.found.wrong.append(f"{kind}: {response.status_code} {response.text[:200]}")

    def compare(self, kind: str, at: int, token_ids: list[int]) -> None:
        """Count an answer that is not the quiet server's as wrong, unless they part at a near-tie."""
        _, expected = self.known[at]
        index = first_difference(token_ids, expected["token_ids"])
        if index is None:
            return
        likely = expected["top"][index] if index < len(expected["top"]) else {}
        gap = max(likely.values(), default=0) - likely.get(token_ids[index] if index < len(token_ids) else -1, -99.0)
        if gap <= TIE_NATS:
            self.found.ties += 1
        else:
            self.found.wrong.append(f"{kind}: prompt {at} parts at token {index}: {token_ids} {expected['token_ids']}")


async def leave(http: httpx.AsyncClient, body: dict[str, Any], streamed: bool) -> None:
    """Ask and go away: after the first token of a stream, or 50 ms into the wait for a whole answer."""
    with suppress(httpx.TimeoutException):
        if not streamed:
            await http.post(COMPLETIONS, json=body, timeout=0.05)
            return
        async with (
            http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response,
            aclosing(response.aiter_lines()) as lines,
        ):
            await anext(lines)


def tokens(lines: list[str]) -> list[int]:
    """Return the token ids of a streamed answer."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or ()]


def reason(response: httpx.Response) -> str:
    """Return why a request was refused, in the server's words: vLLM's own, or FastAPI's where no JSON came."""
    try:
        said = response.json()
        return said["error"]["message"] if "error" in said else said["detail"]
    except (ValueError, KeyError, TypeError):
        return ""


async def drained(terminate: Callable[[], tuple[int, float]], traffic: Traffic) -> tuple[dict[str, Any], Found]:
    """Delete the pod by ``terminate`` while clients ask without a pause on connections that stay, as a gateway's do.

    Every request, each second one streamed, has to be answered whole or refused with 503; one that breaks off is
    ``cut``. Clients go away once they are refused, and a connection that cannot be made any more is none. ``late``
    are answers that ended after the server had first refused.
    """
    limits = httpx.Limits(max_connections=CONCURRENCY, keepalive_expiry=IDLE_SECONDS)
    found: Counter[str] = Counter()
    async with httpx.AsyncClient(
        base_url=traffic.url, headers=HEADERS, timeout=300, limits=limits, trust_env=False
    ) as http:

        async def worker(number: int) -> None:
            while True:
                at = (number := number + 1) % len(traffic.known)
                found["requests"] += 1
                try:
                    response = await traffic.ask(http, at, streamed=number % 2 == 1)
                except httpx.HTTPError:
                    found["cut"] += 1
                    return
                if response.status_code == 503:
                    found["refused"] += 1
                    return
                traffic.judge("while draining", at, response)
                found["late"] += bool(found["refused"])

        workers = [asyncio.create_task(worker(number)) for number in range(CONCURRENCY)]
        await asyncio.sleep(1)
        code, seconds = await asyncio.to_thread(terminate)
        await asyncio.gather(*workers)
    counts = {name: found[name] for name in ("requests", "cut", "late", "refused")}
    return {**counts, "code": code, "seconds": seconds}, traffic.found
