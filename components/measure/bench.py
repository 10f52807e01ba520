"""The measure stage's suites against servers that run already: ``python -m components.measure.bench``.

No pipeline and no model files. Answered items are kept under the state folder until the job is done, so that the same
command continues after a kill.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from components.chats.rows import read_rows
from components.chats.template import Template
from components.contract.context import Input, Inputs, Output
from components.contract.errors import TRANSIENT, StageError, UserError, one_line
from components.contract.log import Log
from components.measure import acceptance, answers, exam, latency, machine, parity, published, suites
from components.measure.endpoint import Endpoint, connect
from components.measure.job import RESULT, Job
from components.measure.ledger import Ledger
from components.measure.speedup import speedup
from components.measure.stage import Config
from components.measure.suites import Bench, Row
from components.store import cache
from components.store.backend import Store
from components.store.work import Work

NAMES = ("measured", "baseline")


def run(job: Job, folder: Path, scratch: Path) -> Row:
    """Measure; write raw samples below ``folder``, one folder a server, and ``result.json``; return the result.

    Keys: ``kind``, ``servers`` [{url, model, root, max_model_len}], ``machine`` (the one that asks, its load before
    and after), ``config``, ``figures`` (those of the stage's metrics, one a server) and ``comparison`` of the first
    server with the second, where there are two.
    """
    endpoints = [connect(url, job.model, job.tokenizer, job.invocations) for url in job.urls]
    config = _fitted(job, endpoints)
    serves = [one.serves for one in endpoints]
    identity = json.dumps([job.model_dump(mode="json"), serves], sort_keys=True)
    store, name = Store(str(cache.home() / "bench")), hashlib.sha256(identity.encode()).hexdigest()
    benches = []
    for side, endpoint in zip(NAMES, endpoints, strict=False):
        output = Output(folder / side, scratch / side, Work(store, f"{name}/{side}"), Log(side))
        for place in (output.path, output.scratch):
            place.mkdir(parents=True, exist_ok=True)
        benches.append(Bench(config, endpoint.tokenizer, endpoint.client, Ledger(output), output, _texts(job)))
    before = machine.describe()
    figures, comparison = _KINDS[job.kind](job, benches)
    result = {
        "kind": job.kind,
        "servers": serves,
        "machine": {**before, "load_after": machine.describe()["load"]},
        "config": job.model_dump(mode="json", exclude={"config"}) | {"config": config.model_dump(mode="json")},
        "figures": figures,
        "comparison": comparison,
    }
    (folder / RESULT).write_text(json.dumps(result, ensure_ascii=False, indent=1, allow_nan=False), encoding="utf-8")
    Work(store, name).clear()
    return result


def _latency(job: Job, benches: list[Bench]) -> tuple[list[Row], Row | None]:
    config = benches[0].config
    for bench in benches:
        bench.ledger.expect(sum(regime.warmups + regime.samples for regime in config.latency.values()))
    figures = suites.measure_latency(benches)
    if len(benches) == 1:
        return figures, None
    fast, slow = (_timed(bench) for bench in benches)
    alone = [name for name, regime in config.latency.items() if regime.concurrency == 1]
    every = speedup(slow, fast, config.seed)
    serial = speedup({name: slow[name] for name in alone}, fast, config.seed)
    return figures, {"speedup": {"regimes": every["regimes"], "mean": serial["mean"]}}


def _timed(bench: Bench) -> dict[str, list[Row]]:
    """Return the timed samples by regime, as ``measure_latency`` has written them."""
    written = json.loads((bench.output.path / "latency.json").read_text(encoding="utf-8"))
    return {name: found["samples"] for name, found in written.items()}


def _acceptance(job: Job, benches: list[Bench]) -> tuple[list[Row], Row | None]:
    config, figures, serial = benches[0].config, [], []
    for bench in benches:
        prompts = _prompts(job, bench, config.template)
        bench.ledger.expect(len(prompts))
        samples = suites.greedy(bench, prompts)
        found = suites.measure_acceptance(bench, samples, None)
        if found["value"] is None:
            raise UserError(f"{bench.client.url}: drafted nothing for {len(prompts)} prompts; it serves no drafter")
        figures.append(found)
        serial.append(samples)
    if len(benches) == 1:
        return figures, None
    return figures, {"gain": acceptance.gain(serial[0], serial[1], config.seed)}


def _parity(job: Job, benches: list[Bench]) -> tuple[list[Row], Row | None]:
    config, prompts = benches[0].config, _parity_prompts(job, benches[0])
    together = prompts[: config.answers.concurrent_prompts]
    figures, sides = [], []
    for bench, name in zip(benches, NAMES, strict=False):
        bench.ledger.expect(len(prompts) + len(together) + suites.sampled_items(config, len(prompts)))
        samples = suites.greedy(bench, prompts)
        sides.append(samples)
        alone = [sample for sample in samples if sample["concurrency"] == 1]
        crowd = [{**sample, "concurrency": 1} for sample in samples if sample["concurrency"] > 1]
        compared = parity.compare(crowd, alone, config.profile.dtype == "float32", bench.tokenizer.decode)
        figures.append({"alone_and_together": compared, "repeated": suites.repeated(bench, prompts, samples)})
        if config.sampled.prompts and len(benches) == 2:
            suites.draw_samples(bench, prompts, name)
    if len(benches) == 1:
        return figures, None
    exact, decode = config.profile.dtype == "float32", benches[0].tokenizer.decode
    comparison: Row = {"greedy": parity.compare(sides[0], sides[1], exact, decode)}
    if config.sampled.prompts:
        here, there = (bench.output.path for bench in benches)
        comparison["sampled"] = suites.compare_samples(here, there, config.seed)
    return figures, comparison


def _quality(job: Job, benches: list[Bench]) -> tuple[list[Row], Row | None]:
    inputs = Inputs({"tasks": [Input(str(path)) for path in job.tasks]})
    items = exam.read_items(job.config, inputs)
    loaded = [exam.load_quality(bench.config, items, bench.output) for bench in benches]
    for bench, tasks in zip(benches, loaded, strict=True):
        bench.ledger.expect(sum(task.count for task in tasks))
    # the second server first: what it answered is the first one's baseline
    baseline = None
    figures: list[Row] = []
    for bench, tasks in reversed(list(zip(benches, loaded, strict=True))):
        figures.insert(0, exam.measure_quality(bench, tasks, baseline))
        baseline = bench.output.path
    paired = {suite: found.get("against_baseline") for suite, found in figures[0].items()}
    return figures, {"paired": paired} if len(benches) == 2 else None


_KINDS: dict[str, Callable[[Job, list[Bench]], tuple[list[Row], Row | None]]] = {
    "latency": _latency,
    "acceptance": _acceptance,
    "parity": _parity,
    "quality": _quality,
}


def _fitted(job: Job, endpoints: list[Endpoint]) -> Config:
    """Return the job's config with the servers' context length in its profile, which every suite keeps to."""
    longest = min((one.longest for one in endpoints if one.longest is not None), default=None)
    for name, regime in job.config.latency.items() if job.kind == "latency" else ():
        if longest is not None and regime.input_tokens + regime.output_tokens > longest:
            raise UserError(
                f"latency.{name}: {regime.input_tokens} and {regime.output_tokens} tokens exceed the server's "
                f"{longest}; choose regimes that fit (--regime)"
            )
    profile = job.config.profile.model_copy(update={"max_model_len": longest})
    return job.config.model_copy(update={"profile": profile})


def _texts(job: Job) -> tuple[str, ...]:
    if job.texts is None:
        return ()
    rows = list(read_rows(job.texts))
    if not rows:
        raise UserError(f"{job.texts}: has no text; leave it out for generated prompts")
    if not all("context" in row or "text" in row for row in rows):
        raise UserError(f"{job.texts}: a row has neither context nor text")
    return tuple(str(row["context"] if "context" in row else row["text"]) for row in rows)


def _prompts(job: Job, bench: Bench, template: Template) -> list[Row]:
    wanted, longest = bench.config.answers, bench.config.profile.max_model_len
    if job.published is not None:
        rows = published.rows(job.published, bench.tokenizer)
    else:
        assert job.prompts is not None, "the command line gives prompts"
        given = list(read_rows(job.prompts))
        if any("conversations" not in row for row in given):
            raise UserError(f"{job.prompts}: a row has no conversations; rows are {{id, category, conversations}}")
        rows = [{"id": str(number), "category": "all", **row} for number, row in enumerate(given)]
    chosen = answers.select(
        rows,
        bench.tokenizer,
        template,
        count=wanted.prompts,
        seed=bench.config.seed,
        longest=None if longest is None else longest - wanted.max_tokens,
    )
    if job.published is not None and len(chosen) < (asked := min(wanted.prompts, len(rows))):
        raise UserError(
            f"{len(chosen)} of {asked} published prompts and {wanted.max_tokens} tokens fit into the server's "
            f"{longest}; serve it with a longer max_model_len, about 10,000"
        )
    return chosen


def _parity_prompts(job: Job, bench: Bench) -> list[Row]:
    """Return prompts in turn: without thinking, with it where the template knows it, and long ones."""
    plain, thinking = (_prompts(job, bench, Template(thinking=on)) for on in (False, True))
    known = {tuple(prompt["prompt_token_ids"]) for prompt in plain}
    thinking = [one for one in thinking if tuple(one["prompt_token_ids"]) not in known]
    longest = bench.config.profile.max_model_len
    tokens = min(job.long_tokens, job.long_tokens if longest is None else longest - bench.config.answers.max_tokens)
    long = []
    for number in range(len(plain)):
        ids = latency.prompt_of_length(bench.tokenizer, tokens, f"{bench.config.seed}/long/{number}")
        about = {"id": f"long-{number}", "category": "long", "prompt": f"{tokens} tokens"}
        long.append({**about, "prompt_token_ids": ids})
    kinds = (plain, [{**one, "id": f"{one['id']}-thinking"} for one in thinking], long)
    turns = (kind[number] for number in range(len(plain)) for kind in kinds if number < len(kind))
    return list(islice(turns, bench.config.answers.prompts))


def main(argv: list[str] | None = None) -> int:
    """Run a job; errors are one line on stderr and an exit code (see components.contract.errors)."""
    parser = argparse.ArgumentParser(prog="python -m components.measure.bench")
    parser.add_argument("--job", required=True, help="the Job as JSON")
    parser.add_argument("--output", type=Path, required=True, help="folder for result.json and the raw samples")
    arguments = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="qdflash-bench-") as scratch:
            run(Job.model_validate_json(arguments.job), arguments.output, Path(scratch))
    except StageError as error:
        print(f"qdflash: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("qdflash: interrupted; the same command continues", file=sys.stderr)
        return TRANSIENT
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
