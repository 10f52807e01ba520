"""The training state that outlives the processes: masters, Adam moments, step and curve.

There is no random state to keep: what a step draws is a function of seeds and the step. Only the newest state is kept.
It is named by master, so any number of processes continues it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from components.store.work import Work
from components.training.parallel import Ranks, Shares

Line = dict[str, Any]
_STATE = "state"


def save_state(
    work: Work | None,
    scratch: Path,
    step: int,
    shares: Shares,
    optimizer: torch.optim.Optimizer,
    curve: list[Line],
    ranks: Ranks,
) -> None:
    """Replace the stored state by this one: every rank writes what it owns, rank 0 (with ``work``) stores it all."""
    folder = scratch / _STATE
    ranks.meet()
    if work is not None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "state.json").write_text(json.dumps({"step": step, "curve": curve}))
    ranks.meet()
    mine = {
        name: {"master": master.detach(), "moments": optimizer.state[master]} for name, master in shares.owned.items()
    }
    torch.save(mine, folder / f"rank-{ranks.rank}.pt")
    ranks.meet()
    if work is not None:
        work.put_folder(_STATE, folder)


def load_state(
    work: Work | None, scratch: Path, shares: Shares, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> tuple[int, list[Line]]:
    """Restore the newest state; return its step and curve, or 0 and an empty curve when there is none."""
    folder = scratch / _STATE
    if work is not None and not work.get_folder(_STATE, folder):
        shutil.rmtree(folder, ignore_errors=True)
    ranks.meet()
    if not (files := sorted(folder.glob("rank-*.pt"))):
        return 0, []
    for file in files:
        stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        for name, one in stored.items():
            master = shares.masters[name]
            master.data.copy_(one["master"])
            if name in shares.owned:
                optimizer.state[master] = {key: _moved(value, master) for key, value in one["moments"].items()}
    document = json.loads((folder / "state.json").read_text())
    return document["step"], document["curve"]


def _moved(value: Any, master: torch.Tensor) -> Any:
    return value.to(master.device, copy=True) if isinstance(value, torch.Tensor) else value
