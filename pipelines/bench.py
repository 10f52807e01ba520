"""``qdflash bench``: the measure stage's suites against any OpenAI-compatible server, without a pipeline."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from components.chats.template import Template
from components.contract.errors import GateError, UserError
from components.measure import published
from components.measure.job import RESULT, Job, Kind
from components.measure.quality import SUITES
from components.measure.stage import REGIMES, Answers, Config, Quality, Regime, Sampled
from components.serving.profiles import Profile
from pipelines import bench_tables, guard, prefetch
from pipelines.artifacts import as_json
from pipelines.display import console
from pipelines.interpreters import environment, interpreter

app = typer.Typer(no_args_is_help=True, help="Measure any OpenAI-compatible server. Its key comes from VLLM_API_KEY.")

CONTINUED = 16
PROMPTS = Path(__file__).with_name("recipes") / "smol" / "prompts.jsonl"

Urls = Annotated[list[str], typer.Argument(help="The server's URL, and that of another to compare it with")]
Model = Annotated[str | None, typer.Option(help="Which of several served models")]
Tokenizer = Annotated[Path | None, typer.Option(help="Folder of the tokenizer, where the server has no /tokenize")]
Invocations = Annotated[bool, typer.Option("--invocations", help="Ask through /invocations instead of /v1")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help=f"Folder for {RESULT} and every raw sample")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON")]
Prompts = Annotated[
    Path, typer.Option(help="JSONL of {id, category, conversations}, a file or a folder of them", exists=True)
]
Data = Annotated[
    Path | None, typer.Option(help="Folder of the benchmarks' items; by default where prefetch puts them")
]


def _suites(known: Iterable[str]) -> Any:
    return typer.Option("--suite", help=f"{', '.join(known)}; repeatable; all if none")


@app.command(epilog="Example:\n\nqdflash bench parity http://127.0.0.1:8000 http://127.0.0.1:8001")
def parity(
    urls: Urls,
    model: Model = None,
    tokenizer: Tokenizer = None,
    prompts: Prompts = PROMPTS,
    count: Annotated[int, typer.Option(help="Prompts: short, with thinking and long ones in turn", min=1)] = 48,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, tokens", min=2)] = 128,
    long: Annotated[int, typer.Option(help="Length of the long prompts, tokens", min=1)] = 2048,
    concurrency: Annotated[int, typer.Option(help="Requests in flight when all are asked again", min=2)] = 8,
    draws: Annotated[int, typer.Option(help="Continuations of a prompt that are sampled; 0: no such test")] = 64,
    exact: Annotated[bool, typer.Option("--exact", help="Allow no near-ties: the servers run in float32")] = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Does it answer as another server does (with and without a drafter), in company, and when asked again?

    Greedy answers token by token, sampled ones by a two-sample test. Exit 3 when they differ.
    """
    config = Config(
        answers=Answers(prompts=count, max_tokens=max_tokens, concurrent_prompts=count, concurrency=concurrency),
        profile=Profile(dtype="float32" if exact else "auto"),
        sampled=Sampled(prompts=CONTINUED, draws=draws) if draws else Sampled(),
    )
    more = {"prompts": prompts.absolute(), "long_tokens": long}
    result = _measure("parity", config, (urls, model, tokenizer), more, output, as_json)
    if faults := bench_tables.faults(result):
        raise GateError(f"parity does not hold: {'; '.join(faults)}")


@app.command(
    epilog="Examples:\n\nqdflash bench acceptance http://127.0.0.1:8000 --count 32\n\n"
    "qdflash bench acceptance http://127.0.0.1:8000 --published"
)
def acceptance(
    urls: Urls,
    model: Model = None,
    tokenizer: Tokenizer = None,
    prompts: Prompts = PROMPTS,
    protocol: Annotated[
        bool,
        typer.Option("--published", help="GSM8K, HumanEval and LongBench-v2, 64 prompts each, in place of --prompts"),
    ] = False,
    data: Data = None,
    count: Annotated[
        int | None, typer.Option(help="Prompts, spread over their categories; 64, or all published ones", min=1)
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, tokens", min=2)] = published.MAX_TOKENS,
    thinking: Annotated[bool, typer.Option(help="Render prompts with thinking on")] = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """How many tokens does a step yield? From vLLM's counters, one request at a time on an idle server."""
    more = {"prompts": prompts.absolute()}
    most = 64
    if protocol:
        files = prefetch.files(data or prefetch.folder(), ["acceptance"])
        more, most = {"published": files[0].parent.absolute()}, published.PROMPTS * len(files)
    config = Config(
        answers=Answers(prompts=count or most, max_tokens=max_tokens, concurrent_prompts=0),
        template=Template(thinking=thinking),
    )
    _measure("acceptance", config, (urls, model, tokenizer), more, output, as_json)


@app.command(epilog="Example:\n\nqdflash bench latency http://127.0.0.1:8000 http://127.0.0.1:8001 --samples 20")
def latency(
    urls: Urls,
    model: Model = None,
    tokenizer: Tokenizer = None,
    invocations: Invocations = False,
    regimes: Annotated[
        list[str] | None,
        typer.Option(
            "--regime", metavar="NAME=IN/OUT", help="Prompt and answer tokens; repeatable; published if none"
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(help="JSONL of {context} or {text} to slice prompts from", exists=True, dir_okay=False),
    ] = None,
    warmups: Annotated[int, typer.Option(help="Requests before the timed ones", min=0)] = 5,
    samples: Annotated[int, typer.Option(help="Timed requests", min=1)] = 50,
    natural: Annotated[bool, typer.Option("--natural", help="Let answers end early, as published")] = False,
    concurrency: Annotated[
        list[int] | None, typer.Option(help="Requests in flight; repeatable, for a sweep; 1 if none", min=1)
    ] = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """How long does a request take? With two servers, in turn, also how many times faster the first one is."""
    config = Config(latency=_regimes(regimes or [], concurrency or [1], warmups, samples, natural))
    _measure(
        "latency", config, (urls, model, tokenizer), {"invocations": invocations, "texts": texts}, output, as_json
    )


@app.command(epilog="Example:\n\nqdflash bench quality http://127.0.0.1:8000 --suite ifeval --limit 50")
def quality(
    urls: Urls,
    model: Model = None,
    tokenizer: Tokenizer = None,
    suites: Annotated[list[str] | None, _suites(SUITES)] = None,
    data: Data = None,
    limit: Annotated[int | None, typer.Option(help="Items a suite; by default all", min=1)] = None,
    shots: Annotated[int | None, typer.Option(help="MMLU-Pro's examples; published: 5", min=0)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer; by default the suite's own", min=1)] = None,
    concurrency: Annotated[int, typer.Option(help="Requests in flight", min=1)] = 8,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """How many questions does it get right? lm-eval's MMLU-Pro, IFEval and GPQA-Diamond, by the published protocol."""
    wanted = _chosen(suites, SUITES)
    folder = data or prefetch.folder()
    config = Config(
        quality={suite: Quality(limit=limit, shots=shots, max_tokens=max_tokens) for suite in wanted},
        quality_concurrency=concurrency,
    )
    tasks = tuple(path.absolute() for path in prefetch.files(folder, wanted))
    _measure("quality", config, (urls, model, tokenizer), {"tasks": tasks}, output, as_json)


@app.command(name="prefetch", epilog="Example:\n\nqdflash bench prefetch --suite ifeval")
def prefetch_(suites: Annotated[list[str] | None, _suites(prefetch.SOURCES)] = None, data: Data = None) -> None:
    """Store the benchmarks' items, and the published acceptance protocol's, once, at pinned revisions.

    GPQA is gated: accept its terms at https://huggingface.co/datasets/Idavidrein/gpqa and set HF_TOKEN; its authors
    ask that its questions are not published.
    """
    for path, rows in prefetch.fetch(_chosen(suites, prefetch.SOURCES), data or prefetch.folder()):
        print(f"{path}: {rows} items", flush=True)


def _chosen(suites: list[str] | None, known: Iterable[str]) -> list[str]:
    """Return the suites asked for, all when none is; raises :class:`UserError` for an unknown one."""
    for suite in suites or ():
        if suite not in known:
            raise UserError(f"--suite {suite}: unknown; choose of {', '.join(known)}")
    return suites or list(known)


def _measure(
    kind: Kind,
    config: Config,
    served: tuple[list[str], str | None, Path | None],
    more: dict[str, Any],
    output: Path | None,
    as_json_: bool,
) -> dict[str, Any]:
    """Run a job with the role that has lm-eval; print its result, as tables or as JSON.

    ``served`` holds URLs, model and tokenizer, ``more`` the job's fields that this kind alone has.
    """
    urls, model, tokenizer = served
    if len(urls) > 2:
        raise UserError(f"{len(urls)} URLs; one server is measured, or compared with one other")
    job = Job(kind=kind, urls=tuple(urls), config=config, model=model, tokenizer=tokenizer, **more)
    with tempfile.TemporaryDirectory(prefix="qdflash-bench-") as temporary:
        folder = output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-I", guard.__file__, str(os.getpid())]
        argv += [interpreter("vllm"), "-m", "components.measure.bench"]
        argv += ["--job", job.model_dump_json(), "--output", str(folder.absolute())]
        done = subprocess.run(argv, env=environment("measure", len(os.sched_getaffinity(0))), check=False)
        if done.returncode:
            raise typer.Exit(done.returncode)  # it has said why, in one line
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    if as_json_:
        print(as_json(result))
    else:
        bench_tables.show(console(), result)
        if output:
            print(output / RESULT)
    return result


def _regimes(
    given: list[str], concurrencies: list[int], warmups: int, samples: int, natural: bool
) -> dict[str, Regime]:
    """Return the regimes by name; those with several requests in flight are called ``NAME@CONCURRENCY``."""
    lengths = {name: (regime.input_tokens, regime.output_tokens) for name, regime in REGIMES.items()}
    if given:
        lengths = dict(map(_lengths, given))
    return {
        name if concurrency == 1 else f"{name}@{concurrency}": Regime(
            input_tokens=read,
            output_tokens=written,
            warmups=warmups,
            samples=samples,
            output="natural" if natural else "exact",
            concurrency=concurrency,
        )
        for name, (read, written) in lengths.items()
        for concurrency in concurrencies
    }


def _lengths(text: str) -> tuple[str, tuple[int, int]]:
    name, _, lengths = text.partition("=")
    read, _, written = lengths.partition("/")
    if not name or not read.isdigit() or not written.isdigit() or int(read) < 1 or int(written) < 2:
        raise UserError(f"--regime {text}: expected NAME=IN/OUT, for example short=64/128")
    return name, (int(read), int(written))
