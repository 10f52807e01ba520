"""Checkpoints to the choice of the one that is packed."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig, runtime
from components.contract.errors import UserError
from components.contract.stage import Port

ROLE = "train"
VERSION = 2
INPUTS = {
    "qad": Port("checkpoints/step-N/latents.safetensors"),
    "student": Port("the INT4 folder that the checkpoints were trained from"),
    "teacher": Port("the dense model folder whose predictions are matched"),
    "sequences": Port("token sequences with loss masks; the val split is used"),
    "tasks": Port("sciq.jsonl, boolq.jsonl, piqa.jsonl, hellaswag.jsonl: the data sets' own rows", True, True),
}
OUTPUTS = {
    "scores.json": "rule, chosen step, qad's digest; kl, top1_agreement, codes_changed, tokens, accuracy of each step",
}


class Config(StageConfig):
    """How checkpoints are compared."""

    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Type of both models' computation; that of the checkpoints"
    )
    items: int = Field(500, description="First so many rows of each task are asked", ge=1)
    cache_teacher: bool = runtime(
        True,
        "Keep the teacher's hidden states on local disk (for a token as many numbers as its hidden size): each "
        "sequence passes it once",
    )


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Score every checkpoint and name the best."""
    from components.select.quality import Quality
    from components.select.scores import score_all

    checkpoints = _checkpoints(inputs["qad"].path, inputs["qad"].uri)
    files = {Path(one.uri).name: one.path for one in inputs.all("tasks")}
    quality = Quality(files, config.items, output.scratch) if files else None
    teacher, student, sequences = (inputs[port].path for port in ("teacher", "student", "sequences"))
    scores = score_all(config, checkpoints, teacher, student, sequences, quality, output)
    trained = [one for one in scores if one["step"]]
    chosen = min(trained, key=lambda one: (-one.get("mean_accuracy", 0.0), one["kl"], one["step"]))
    rule = "highest mean accuracy" if files else "lowest kl"
    document = {"rule": rule, "chosen": chosen["step"], "qad": inputs["qad"].digest, "scores": scores}
    (output.path / "scores.json").write_text(json.dumps(document, indent=1))
    metrics = {
        "step": chosen["step"],
        "checkpoints": len(checkpoints),
        "tokens": chosen["tokens"],
        "kl_start": scores[0]["kl"],
        "kl": chosen["kl"],
        "top1_start": scores[0]["top1_agreement"],
        "top1": chosen["top1_agreement"],
        "codes_changed": chosen["codes_changed"],
    }
    if files:
        metrics |= {"mean_accuracy_start": scores[0]["mean_accuracy"], "mean_accuracy": chosen["mean_accuracy"]}
    return metrics


def _checkpoints(folder: Path, uri: str) -> dict[int, Path]:
    found = {int(path.name.removeprefix("step-")): path for path in (folder / "checkpoints").glob("step-*")}
    if not found:
        raise UserError(f"{uri}: holds no checkpoints/step-N; an artifact of the qad stage is needed")
    return dict(sorted(found.items()))
