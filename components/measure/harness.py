"""lm-eval as a library: its task definitions, prompts, filters and metrics, with local rows and our own endpoint."""

import json
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from components.contract.errors import UserError
from components.measure.quality import SUITES, Row

Messages = list[dict[str, str]]
AnswerAll = Callable[[list[tuple[Messages, dict[str, Any]]]], list[Row]]

# The seeds of lm-eval's own command line: they fix the order of GPQA's choices.
PYTHON_SEED, FEWSHOT_SEED = 0, 1234
PUNKT_INSTRUCTIONS = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}
CHANCE_SHIFTS = 5


def load_tasks(name: str, rows: dict[str, list[Row]], shots: int, scratch: Path) -> dict[str, Any]:
    """Build lm-eval's task (one a subject for MMLU-Pro) on ``rows`` by split, offline.

    Raises :class:`UserError` for an unknown subject, and for IFEval items whose judging needs nltk data that is not on
    this machine.
    """
    import datasets
    import lm_eval.tasks

    datasets.disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    folder = Path(lm_eval.tasks.__file__).parent / SUITES[name].folder
    manager = lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False)
    data = {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": _write(name, rows, scratch), "cache_dir": str(scratch / "datasets")},
        "num_fewshot": shots,
    }
    names = _task_names(name, rows, manager)
    random.seed(PYTHON_SEED)
    with _without_downloads(name, rows):
        loaded = manager.load({"group": name, "task": [{"task": task, **data} for task in names]})
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return loaded


def run(name: str, tasks: dict[str, Any], answer_all: AnswerAll) -> list[Row]:
    """Ask every item and return one sample an item: ``task``, ``id``, ``messages``, ``text``, ``marks``, ….

    ``answer_all`` gets ``(messages, generation_kwargs)`` per item and returns rows with ``text`` and
    ``finish_reason``; both travel into the sample. What it raises ends the run: a failed request is no wrong answer.
    """
    import langdetect
    from lm_eval.evaluator import evaluate

    langdetect.DetectorFactory.seed = 0
    endpoint = _endpoint(answer_all)
    found = evaluate(
        lm=endpoint, task_dict=tasks, apply_chat_template=True, fewshot_as_multiturn=True, bootstrap_iters=0
    )
    suite = SUITES[name]
    samples = []
    for task in sorted(found["samples"]):
        for sample in sorted(found["samples"][task], key=lambda one: one["doc_id"]):
            if sample["filter"] != suite.filter:
                continue
            context = sample["arguments"][0][0]
            marks = sample[suite.metric]
            samples.append(
                {
                    "task": task,
                    "id": sample["doc_id"],
                    "messages": json.loads(context),
                    "target": sample["target"],
                    "extracted": sample["filtered_resps"][0],
                    "marks": [bool(mark) for mark in (marks if isinstance(marks, list) else [marks])],
                    **endpoint.answers[context],
                }
            )
    return samples


def chance(name: str, tasks: dict[str, Any], samples: list[Row]) -> float:
    """Return the score of answering without reading.

    Multiple choice: one over the number of choices. IFEval: the answers given to other items, judged by this item's
    instructions (each item with the next few items' answers).
    """
    docs = [(task, doc) for _, task in sorted(tasks["tasks"].items()) for doc in task.eval_docs]
    if name == "gpqa":
        return 0.25
    if name == "mmlu_pro":
        return sum(1 / min(len(doc["options"]), 10) for _, doc in docs) / len(docs)
    metric, marks = SUITES[name].metric, []
    for shift in range(1, min(CHANCE_SHIFTS, len(docs) - 1) + 1):
        for index, (task, doc) in enumerate(docs):
            other = samples[(index + shift) % len(samples)]["text"]
            marks += task.process_results(doc, [other])[metric]
    return sum(marks) / len(marks) if marks else 0.0


def _endpoint(answer_all: AnswerAll) -> Any:
    from lm_eval.api.model import LM

    class Endpoint(LM):
        """Passes conversations on as JSON text; every other kind of request is not needed by these suites."""

        tokenizer_name = "served"

        def __init__(self) -> None:
            super().__init__()
            self.answers: dict[str, Row] = {}

        def apply_chat_template(self, chat_history: Messages, add_generation_prompt: bool = True) -> str:
            return json.dumps([{"role": turn["role"], "content": turn["content"]} for turn in chat_history])

        def generate_until(self, requests: list[Any]) -> list[str]:
            asked = {one.args[0]: dict(one.args[1]) for one in requests}
            rows = answer_all([(json.loads(context), settings) for context, settings in asked.items()])
            self.answers = dict(zip(asked, rows, strict=True))
            return [self.answers[one.args[0]]["text"] for one in requests]

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            raise NotImplementedError

    return Endpoint()


def _write(name: str, rows: dict[str, list[Row]], scratch: Path) -> dict[str, str]:
    files = {}
    for split, many in rows.items():
        path = scratch / f"{name}-{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in many), encoding="utf-8")
        files[split] = str(path)
    return files


def _task_names(name: str, rows: dict[str, list[Row]], manager: Any) -> list[str]:
    if name == "gpqa":
        return ["gpqa_diamond_cot_zeroshot"]
    if name == "ifeval":
        return ["ifeval"]
    names = {f"mmlu_pro_{row['category'].replace(' ', '_')}": row["category"] for row in rows["test"]}
    for task, subject in names.items():
        if task not in manager.all_subtasks:
            raise UserError(f"quality: mmlu_pro.jsonl: {subject!r} is not one of MMLU-Pro's subjects")
    return sorted(names)


@contextmanager
def _without_downloads(name: str, rows: dict[str, list[Row]]) -> Iterator[None]:
    """Keep lm-eval's IFEval module from fetching nltk's sentence model when it is imported without one."""
    if name != "ifeval":
        yield
        return
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
        yield
        return
    except LookupError:
        pass
    for row in rows["train"]:
        if needs := PUNKT_INSTRUCTIONS & set(row["instruction_id_list"]):
            raise UserError(
                f"quality: ifeval.jsonl item {row['key']} ({', '.join(sorted(needs))}) is judged with nltk's "
                "punkt_tab, which is not on this machine; point NLTK_DATA at a folder that has it, or leave them out"
            )
    with mock.patch("nltk.data.find"):
        yield
