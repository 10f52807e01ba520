"""Which interpreter runs which role, and the environment its processes get."""

import os
import sys
from pathlib import Path

from components.contract.errors import UserError
from components.store import cache

ROLES = ("core", "train", "vllm")
ONLINE = ("model", "prompts")
_PROJECT = Path(__file__).resolve().parents[1]


def interpreter(role: str) -> str:
    """Return the role's Python: ``QDFLASH_PYTHON_<ROLE>``, ``.venv/<role>`` beside the project or beside this one.

    Raises :class:`UserError` when there is none.
    """
    variable = f"QDFLASH_PYTHON_{role.upper()}"
    named = os.environ.get(variable)
    if named:
        if not os.access(named, os.X_OK):
            raise UserError(f"{variable}={named}: not an executable")
        return named
    for environments in (_PROJECT / ".venv", Path(sys.prefix).parent):
        python = environments / role / "bin" / "python"
        if python.exists():
            return str(python)
    raise UserError(
        f"role {role}: no {_PROJECT / '.venv' / role}; run make setup, or set {variable} to its interpreter"
    )


def environment(stage: str, cpu: int) -> dict[str, str]:
    """Return the whole environment of a task's process: ours with the store's credentials, and its settings."""
    path = os.pathsep.join(filter(None, [str(_PROJECT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "QDFLASH_HOME": str(cache.home()), **settings(stage, cpu)}


def settings(stage: str, cpu: float) -> dict[str, str]:
    """Return what every task's environment says, wherever it runs: its share of threads, hubs off by default."""
    found = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Threads that spin while they wait take the core from a task that runs beside this one.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        found[name] = str(max(1, int(cpu)))
    if stage not in ONLINE:
        found |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return found
