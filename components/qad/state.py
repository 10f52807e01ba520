"""The training state that outlives the process: masters, Adam moments, step, curve and finished checkpoints.

There is no random state to keep: nothing in the loop draws numbers, and the order of sequences is a function of seed
and step. Only the newest state is kept.
"""

import json
from pathlib import Path
from typing import Any

import torch

from components.qad.student import Student
from components.store.work import Work

Line = dict[str, Any]
_STATE, _CHECKPOINTS = "state", "checkpoints"


def save_state(
    work: Work, scratch: Path, step: int, student: Student, optimizer: torch.optim.Optimizer, curve: list[Line]
) -> None:
    """Replace the stored state by this one."""
    folder = scratch / _STATE
    folder.mkdir(exist_ok=True)
    masters = {name: layer.weight.detach() for name, layer in student.layers.items()}
    torch.save({"masters": masters, "optimizer": optimizer.state_dict()}, folder / "state.pt")
    (folder / "state.json").write_text(json.dumps({"step": step, "curve": curve}))
    work.put_folder(_STATE, folder)


def load_state(
    work: Work, scratch: Path, student: Student, optimizer: torch.optim.Optimizer
) -> tuple[int, list[Line]]:
    """Restore the newest state; return its step and curve, or 0 and an empty curve when there is none."""
    folder = scratch / _STATE
    if not work.get_folder(_STATE, folder):
        return 0, []
    stored = torch.load(folder / "state.pt", weights_only=True)
    for name, layer in student.layers.items():
        layer.weight.data.copy_(stored["masters"][name])
    optimizer.load_state_dict(stored["optimizer"])
    document = json.loads((folder / "state.json").read_text())
    return document["step"], document["curve"]


def save_checkpoint(work: Work, output: Path, step: int, student: Student) -> None:
    """Write ``checkpoints/step-N`` into the output, and keep it for a run that continues this one."""
    name = f"{_CHECKPOINTS}/step-{step}"
    student.save(output / name)
    work.put_folder(name, output / name)


def restore_checkpoints(work: Work, output: Path, step: int) -> None:
    """Bring the checkpoints up to ``step`` back into the output; later ones will be made again."""
    for name in work.folders():
        if name.startswith(f"{_CHECKPOINTS}/") and int(name.rpartition("-")[2]) <= step:
            work.get_folder(name, output / name)
