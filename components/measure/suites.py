"""Parity, acceptance and latency of a running server: ask through the ledger, write the samples, return figures."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from components.chats.rows import read_rows, write_rows
from components.contract.context import Output
from components.contract.errors import UserError
from components.measure import acceptance, answers, latency, parity, sampling
from components.measure.bigram import Bigram, replay
from components.measure.ledger import Ask, Ledger
from components.serving.client import Client

if TYPE_CHECKING:
    from components.measure.stage import Config, Regime

SAMPLED = "sampled.json"
REPEATED = 4
Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """What every suite needs: whom to ask, where answers are kept, and what was asked for."""

    config: "Config"
    tokenizer: Any
    client: Client
    ledger: Ledger
    output: Output
    texts: tuple[str, ...] = ()
    """What latency prompts are sliced from; generated sentences where there are none."""

    def write(self, name: str, document: Any) -> None:
        """Write one of the stage's JSON files."""
        (self.output.path / name).write_text(json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False))


def greedy(bench: Bench, prompts: list[Row]) -> list[Row]:
    """Answer every prompt alone, the first ones once more concurrently; write ``samples.jsonl``."""
    asked = bench.config.answers
    alone, together = prompts, prompts[: asked.concurrent_prompts]
    serial = bench.ledger.items(
        {
            f"answer/{prompt['id']}": partial(answers.ask_alone, bench.client, prompt, asked.max_tokens)
            for prompt in alone
        },
        concurrency=1,
    )
    concurrent = bench.ledger.items(
        {
            f"answer-concurrently/{prompt['id']}": partial(answers.ask, bench.client, prompt, asked.max_tokens)
            for prompt in together
        },
        concurrency=asked.concurrency,
    )
    samples = [
        {**prompt, "concurrency": concurrency, **record}
        for concurrency, many, records in ((1, alone, serial), (asked.concurrency, together, concurrent))
        for prompt, record in zip(many, records, strict=True)
    ]
    write_rows(bench.output.path / "samples.jsonl", samples)
    return samples


def tokens_per_second(samples: list[Row]) -> float:
    """Return generated tokens per second over the answers that were asked for one at a time."""
    serial = [sample for sample in samples if sample["concurrency"] == 1]
    return sum(len(sample["token_ids"]) for sample in serial) / sum(sample["seconds"] for sample in serial)


def compare_with_baseline(bench: Bench, samples: list[Row], baseline: Path) -> Row:
    """Compare the answers with an earlier measurement's; write ``parity.json``; return its figures."""
    exact = bench.config.profile.dtype == "float32"
    found = parity.compare(samples, list(read_rows(baseline)), exact, bench.tokenizer.decode)
    bench.write("parity.json", found)
    for difference in found["differences"]:
        bench.output.log.event("parted", **difference)
    return {key: value for key, value in found.items() if key != "differences"}


def sampled_items(config: "Config", prompts: int) -> int:
    """Return how many items :func:`repeated` and :func:`draw_samples` ask for."""
    wanted = min(config.sampled.prompts, prompts)
    return 3 * min(REPEATED, prompts) + len(sampling.SETTINGS) * wanted if wanted else 0


def repeated(bench: Bench, prompts: list[Row], samples: list[Row]) -> Row:
    """Ask the first prompts again; return how many answers are the same: ``{greedy, seeded}``, each {compared, equal}.

    Greedy answers are compared with ``samples``; answers sampled at temperature 1 with one seed, with each other.
    """
    prompts = prompts[:REPEATED]
    first = {sample["id"]: sample["token_ids"] for sample in samples if sample["concurrency"] == 1}
    tokens, freely = bench.config.answers.max_tokens, sampling.SETTINGS["temperature 1"]
    asks: dict[str, Ask] = {}
    for prompt in prompts:
        asks[f"again/{prompt['id']}"] = partial(answers.ask, bench.client, prompt, tokens)
        for time in ("once", "twice"):
            asks[f"seeded/{time}/{prompt['id']}"] = partial(
                answers.ask_sampled, bench.client, prompt, 1, tokens, freely, str(bench.config.seed)
            )
    records = bench.ledger.items(asks, concurrency=1)
    greedy_equal = sum(
        again["token_ids"] == first[prompt["id"]] for prompt, again in zip(prompts, records[::3], strict=True)
    )
    seeded_equal = sum(one == other for one, other in zip(records[1::3], records[2::3], strict=True))
    return {
        "greedy": {"compared": len(prompts), "equal": greedy_equal},
        "seeded": {"compared": len(prompts), "equal": seeded_equal},
    }


def draw_samples(bench: Bench, prompts: list[Row], salt: str) -> None:
    """Draw continuations in every way of :data:`sampling.SETTINGS`; write ``sampled.json``.

    It holds token ids [draws, tokens] by prompt, by way to sample; of the shortest prompts, since each is read once a
    continuation. ``salt`` keeps two servers' seeds apart.
    """
    wanted = bench.config.sampled
    prompts = sorted(prompts, key=lambda one: (len(one["prompt_token_ids"]), one["id"]))[: wanted.prompts]
    drawn = {}
    for name, settings in sampling.SETTINGS.items():
        asks: dict[str, Ask] = {}
        for prompt in prompts:
            ask = partial(answers.ask_sampled, bench.client, prompt, wanted.draws, wanted.tokens, settings)
            asks[f"sampled/{name}/{prompt['id']}"] = partial(ask, f"{bench.config.seed}/{salt}/{name}")
        records = bench.ledger.items(asks, concurrency=1)
        drawn[name] = {one["id"]: record["token_ids"] for one, record in zip(prompts, records, strict=True)}
    bench.write(SAMPLED, drawn)


def compare_samples(here: Path, there: Path, seed: int) -> Row:
    """Test that two measurements' continuations are distributed alike; ``{passed, tests {way to sample: found}}``.

    See :func:`components.measure.sampling.compare`. Raises :class:`UserError` when they are not of the same prompts.
    """
    one, other = (
        json.loads((folder / SAMPLED).read_text()) if (folder / SAMPLED).exists() else {} for folder in (here, there)
    )
    if {name: list(many) for name, many in one.items()} != {name: list(many) for name, many in other.items()}:
        raise UserError("parity: the baseline continued other prompts; measure it with the same sampled section")
    tests = {name: sampling.compare(_arrays(one[name]), _arrays(other[name]), seed) for name in one}
    return {"passed": all(test["passed"] for test in tests.values()), "tests": tests}


def measure_acceptance(bench: Bench, samples: list[Row], chats: Path | None) -> Row:
    """Summarise the drafts of the serial answers, beside a bigram drafter's; write ``acceptance.json``."""
    seed = bench.config.seed
    serial = [sample for sample in samples if sample["concurrency"] == 1]
    figures = acceptance.summarise(serial, seed)
    raw = {"drafter": _drafts(serial)}
    if chats is not None:
        bigram = Bigram([*row["prompt_token_ids"], *row["token_ids"]] for row in read_rows(chats))
        drafted = len(serial[0]["accepted"])
        replayed = []
        for sample in serial:
            drafts, accepted = replay(bigram, sample["token_ids"], drafted)
            replayed.append({**sample, "drafts": drafts, "accepted": accepted})
        figures["bigram"] = acceptance.summarise(replayed, seed)
        figures["gain_over_bigram"] = acceptance.gain(serial, replayed, seed)
        raw["bigram"] = _drafts(replayed)
    bench.write("acceptance.json", {**figures, "prompts": raw})
    return figures


def measure_latency(benches: Sequence[Bench]) -> list[Row]:
    """Time every regime on each server; write ``latency.json``; return the figures by regime, one a server.

    Where requests go out one at a time the servers take turns, request by request, so that what else the machine does
    meets all of them alike; with several in flight they are timed one after the other.
    """
    raw: list[dict[str, list[Row]]] = [{} for _ in benches]
    for name, regime in benches[0].config.latency.items():
        asks = [_latency_asks(bench, name, regime) for bench in benches]
        if regime.concurrency == 1:
            turns = [
                [bench.ledger.item(key, ask[key]) for bench, ask in zip(benches, asks, strict=True)] for key in asks[0]
            ]
            sides = [list(side) for side in zip(*turns, strict=True)]
        else:
            sides = [bench.ledger.items(ask, regime.concurrency) for bench, ask in zip(benches, asks, strict=True)]
        for kept, samples in zip(raw, sides, strict=True):
            kept[name] = samples[regime.warmups :]
    figures = []
    for bench, timed in zip(benches, raw, strict=True):
        found = {
            name: latency.summarise(samples, bench.config.seed, bench.config.latency[name].concurrency)
            for name, samples in timed.items()
        }
        bench.write("latency.json", {name: {**found[name], "samples": timed[name]} for name in found})
        for name in found:
            if not found[name]["n"]:
                bench.ledger.forget(_latency_keys(name, bench.config.latency[name]))
                first = timed[name][0]["failed"]
                raise UserError(f"measure: all {len(timed[name])} requests of latency.{name} failed: {first}")
        figures.append(found)
    return figures


def _latency_keys(name: str, regime: "Regime") -> list[str]:
    return [f"latency/{name}/{number}" for number in range(regime.warmups + regime.samples)]


def _latency_asks(bench: Bench, name: str, regime: "Regime") -> dict[str, Ask]:
    asks: dict[str, Ask] = {}
    keys = _latency_keys(name, regime)
    count, seed = regime.input_tokens, bench.config.seed
    if bench.texts:
        prompts = latency.slices(bench.tokenizer, bench.texts, count, len(keys))
    else:
        prompts = [latency.prompt_of_length(bench.tokenizer, count, f"{seed}/{key}") for key in keys]
    for key, prompt in zip(keys, prompts, strict=True):
        asks[key] = partial(latency.time_one, bench.client, prompt, regime.output_tokens, regime.output)
    return asks


def _drafts(records: list[Row]) -> list[Row]:
    return [{key: record[key] for key in ("id", "category", "drafts", "accepted")} for record in records]


def _arrays(drawn: dict[str, list[list[int]]]) -> list[np.ndarray]:
    return [np.array(ids) for ids in drawn.values()]
