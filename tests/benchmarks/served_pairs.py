"""Greedy answers of several servers to the same prompts, one request at a time, in turn.

Each request becomes a row of a JSON Lines file: what it drafted by the server's own counters, and its times.
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from components.chats.rows import Row
from components.contract.errors import StageError
from components.measure import intervals
from components.serving.profiles import Profile

if TYPE_CHECKING:
    from components.serving.client import Client
    from components.serving.server import Server

WARM_UPS = 2


@dataclass(frozen=True)
class Pair:
    """A target's folder and its drafter's, or None for the target alone."""

    target: Path
    draft: Path | None


def measure(
    pairs: dict[str, Pair],
    prompts: dict[str, list[Row]],
    profile: Profile,
    tokens: int,
    at_once: int,
    file: Path,
) -> None:
    """Ask every pair every prompt (by regime) that ``file`` has no row of, up to ``tokens`` tokens an answer.

    ``at_once`` servers run beside each other, idle but for the one that is asked. A server that does not start leaves
    its log beside ``file`` and no rows.
    """
    from components.serving.server import Server

    done = {(row["variant"], row["regime"], row["id"]) for row in read(file)}
    names = list(pairs)
    for first in range(0, len(names), at_once):
        with contextlib.ExitStack() as stack:
            servers: dict[str, Server] = {}
            for name in names[first : first + at_once]:
                log = file.with_name(f"server-{name.replace(' ', '-')}.log")
                pair = pairs[name]
                servers[name] = stack.enter_context(Server(pair.target, pair.draft, profile, log_path=log))
                if name == names[first]:
                    _ready(servers, name)  # what it compiles is there for the others
            for name in names[first + 1 : first + at_once]:
                _ready(servers, name)
            _ask(servers, prompts, tokens, done, file)


def _ready(servers: dict[str, "Server"], name: str) -> None:
    """Wait for a server, or take it out: the others still have something to say."""
    try:
        servers[name].wait()
        print(f"{name}: ready after {servers[name].start_seconds:.0f} s", flush=True)
    except StageError as error:
        print(f"{name}: {error}", flush=True)
        del servers[name]


def _ask(
    servers: dict[str, "Server"],
    prompts: dict[str, list[Row]],
    tokens: int,
    done: set[tuple[str, str, str]],
    file: Path,
) -> None:
    for regime, asked in prompts.items():
        for server in servers.values():
            for prompt in asked[:WARM_UPS]:
                server.client.complete(prompt["prompt_token_ids"], max_tokens=tokens)
        for prompt in asked:
            for name, server in servers.items():
                if (name, regime, prompt["id"]) in done:
                    continue
                row = {"variant": name, "regime": regime, **_one(server.client, prompt, tokens)}
                with file.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
        print(f"{regime}: {len(asked)} prompts asked", flush=True)


def _one(client: "Client", prompt: Row, tokens: int) -> Row:
    from components.measure import answers

    before = answers.settled(client)
    got = client.stream(prompt["prompt_token_ids"], max_tokens=tokens)
    counted = answers.settled(client, before.generation_tokens + len(got.token_ids)) - before
    return {
        "id": prompt["id"],
        "category": prompt["category"],
        "prompt_token_ids": prompt["prompt_token_ids"],
        "token_ids": got.token_ids,
        "drafts": counted.drafts,
        "accepted": list(counted.accepted_per_position),
        "seconds": got.seconds,
        "first": got.first_token_seconds,
    }


def read(file: Path) -> list[Row]:
    """Return the rows so far."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def step_ms(rows: list[Row]) -> dict[str, Any]:
    """Return milliseconds per step after the first token, Σ seconds / Σ steps, with prompts resampled."""
    rows = [row for row in rows if len(row["token_ids"]) > 1]
    seconds = [1000 * (row["seconds"] - row["first"]) for row in rows]
    steps = [row["drafts"] or len(row["token_ids"]) - 1 for row in rows]
    low, high = intervals.ratio_interval(seconds, steps, 0)
    return {"value": sum(seconds) / sum(steps), "low": low, "high": high, "n": len(rows)}


def latency_ms(rows: list[Row]) -> dict[str, Any]:
    """Return the median time of a request in milliseconds."""
    times = [1000 * row["seconds"] for row in rows]
    low, high = intervals.median_interval(times, 0)
    return {"value": float(np.median(times)), "low": low, "high": high, "n": len(times)}


def paired(rows: list[Row], base: list[Row], statistic: Callable[[np.ndarray, np.ndarray], Any]) -> dict[str, Any]:
    """Compare two variants on the prompts that both answered, which are resampled together.

    ``statistic`` maps two arrays [3, resamples, prompts] of accepted tokens, drafts and milliseconds to one value a
    resample.
    """
    others = {row["id"]: row for row in base}
    both = [(row, others[row["id"]]) for row in rows if row["id"] in others]
    columns = [
        np.array([[sum(one["accepted"]), one["drafts"], 1000 * one["seconds"]] for one in side], dtype=np.float64).T
        for side in zip(*both, strict=True)
    ]
    low, high = intervals.bootstrap(len(both), lambda i: statistic(columns[0][:, i], columns[1][:, i]), 0)
    value = float(statistic(columns[0][:, None], columns[1][:, None])[0])
    return {"value": value, "low": low, "high": high, "n": len(both)}


def acceptance_ratio(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return acceptance length over acceptance length."""
    lengths = [1 + side[0].sum(-1) / side[1].sum(-1) for side in (one, other)]
    return np.asarray(lengths[0] / lengths[1])


def latency_ratio(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return time over time, all requests together."""
    return np.asarray(one[2].sum(-1) / other[2].sum(-1))
