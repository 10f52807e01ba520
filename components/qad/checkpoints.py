"""Finished checkpoints: written into the output, and kept for a run that continues this one."""

from pathlib import Path

from components.contract.errors import UserError
from components.qad.student import Student
from components.store.work import Work

_CHECKPOINTS = "checkpoints"


def save_checkpoint(work: Work | None, output: Path, step: int, student: Student) -> None:
    """Write ``checkpoints/step-N`` into the output, and with ``work`` keep it for a run that continues this one."""
    name = f"{_CHECKPOINTS}/step-{step}"
    student.save(output / name)
    if work is not None:
        work.put_folder(name, output / name)


def restore_checkpoints(work: Work, output: Path, step: int) -> None:
    """Bring the checkpoints up to ``step`` back into the output; later ones will be made again.

    Raises:
        UserError: one is damaged; the steps that made it are behind this run.
    """
    for name in work.folders():
        is_before = name.startswith(f"{_CHECKPOINTS}/") and int(name.rpartition("-")[2]) <= step
        if is_before and not work.get_folder(name, output / name):
            raise UserError(f"{work.prefix}: its {name} is damaged; remove {work.prefix} from the store to train anew")
