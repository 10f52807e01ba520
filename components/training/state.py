"""The training state that outlives the processes: masters, Adam moments, step and curve.

There is no random state to keep: what a step draws is a function of seeds and the step. Only the newest state is kept.
It is named by master, so any number of processes continues it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from components.contract.errors import UserError
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
    """Replace the stored state by this one: every rank writes what it owns, the first of each machine stores that.

    The state is there once rank 0 has stored its part, last, which names the others. ``work`` is not None there.
    """
    folder = scratch / _STATE
    parts = [f"{_STATE}-{step}-{node}" for node in range(1, ranks.nodes)]
    ranks.meet()
    if ranks.local == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    if ranks.rank == 0:
        (folder / "state.json").write_text(json.dumps({"step": step, "curve": curve, "parts": parts}))
    ranks.meet()
    mine = {
        name: {"master": master.detach(), "moments": optimizer.state[master]} for name, master in shares.owned.items()
    }
    with (folder / f"rank-{ranks.rank}.pt").open("wb") as file:  # by its name alone, torch hides why a write fails
        torch.save(mine, file)
    ranks.meet()
    if work is not None and ranks.local == 0 and ranks.node:
        work.put_folder(parts[ranks.node - 1], folder)
    if parts:
        ranks.meet()
    if work is not None and ranks.rank == 0:
        work.put_folder(_STATE, folder)
        for name in work.folders():
            if name.startswith(f"{_STATE}-") and name not in parts:
                work.delete_folder(name)


def load_state(
    work: Work | None, scratch: Path, shares: Shares, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> tuple[int, list[Line]]:
    """Restore the newest state; return its step and curve, or 0 and an empty curve when there is none.

    Raises:
        UserError: it is damaged; training anew costs what it held, so that is for the user to say.
    """
    folder = scratch / _STATE
    missing = work is not None and ranks.local == 0 and not _fetch(work, folder)
    if ranks.sum(missing)[0]:  # on any machine: all begin anew
        return 0, []
    if not (files := sorted(folder.rglob("rank-*.pt"))):
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


def _fetch(work: Work, folder: Path) -> bool:
    """Fetch the state with its parts; return False when there is none."""
    if _STATE not in work.folders():
        return False
    if work.get_folder(_STATE, folder):
        parts = json.loads((folder / "state.json").read_text()).get("parts", ())
        if all(work.get_folder(part, folder / part) for part in parts):
            return True
    raise UserError(f"{work.prefix}: its training state is damaged; remove {work.prefix} from the store to train anew")


def _moved(value: Any, master: torch.Tensor) -> Any:
    return value.to(master.device, copy=True) if isinstance(value, torch.Tensor) else value
