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


def restore_checkpoints(work: Work, output: Path, step: int, every: int) -> None:
    """Bring the checkpoints up to ``step``, each ``every`` steps, back into the output; later ones will be made again.

    Raises:
        UserError: one is missing or damaged; the steps that made it are behind this run.
    """
    for past in range(every, step + 1, every):
        name = f"{_CHECKPOINTS}/step-{past}"
        if not work.get_folder(name, output / name):
            raise UserError(
                f"{work.prefix}: its {name} is missing or damaged; remove {work.prefix} from the store to train anew"
            )
