"""Accuracy on SciQ, BoolQ, PIQA and HellaSwag by log-likelihood: lm-eval's task definitions on local rows."""

import json
import logging
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from components.select.rows import task_rows

SPLITS = {"sciq": "test", "boolq": "validation", "piqa": "validation", "hellaswag": "validation"}
_FOLDERS = {"boolq": "super_glue/boolq"}


class Quality:
    """The tasks whose rows are there.

    Raises:
        UserError: a file that is no task's, is empty, or lacks a field.
    """

    def __init__(self, files: dict[str, Path], items: int, scratch: Path) -> None:
        """Read the first ``items`` rows of each of ``files``, from ``<task>.jsonl`` to where its copy lies."""
        import datasets
        from lm_eval import tasks

        datasets.disable_progress_bars()
        logging.getLogger("lm_eval").setLevel(logging.WARNING)
        self._tasks: dict[str, Any] = {}
        for file, path in sorted(files.items()):
            name = file.removesuffix(".jsonl")
            rows = task_rows(file, path, items)
            cut = scratch / f"tasks-{name}.jsonl"
            cut.write_text("".join(json.dumps(row) + "\n" for row in rows))
            manager = tasks.TaskManager(
                include_path=Path(tasks.__file__).parent / _FOLDERS.get(name, name), include_defaults=False
            )
            own = dict.fromkeys(("training_split", "validation_split", "test_split"))
            own |= {f"{SPLITS[name]}_split": "rows"}
            data = {"data_files": {"rows": str(cut)}, "cache_dir": str(scratch / "datasets")}
            wanted = {"task": name, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": data, **own}
            self._tasks |= manager.load({"group": name, "task": [{**wanted, "num_fewshot": 0}]})["tasks"]

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def accuracy(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
        """Return the share of items of each task whose right answer has the highest log-likelihood (``acc``)."""
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM

        served = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=8)
        found = evaluate(lm=served, task_dict=self._tasks, bootstrap_iters=0, log_samples=False)
        return {name: float(found["results"][name]["acc,none"]) for name in self._tasks}
