"""From the student and one checkpoint to the folder that is served."""

from pathlib import Path

from components.checkpoint.census import check_fused, unquantized
from components.checkpoint.config import read_config
from components.checkpoint.grid import quantized_modules
from components.checkpoint.tensors import Tensors
from components.checkpoint.unpack import passthrough_streams
from components.checkpoint.write import save_quantized
from components.contract.log import Log
from components.pack.latents import Latents


def write_target(student: Path, checkpoint: Path, sidecars: Path, destination: Path, log: Log) -> Latents:
    """Write the W4A16 folder, one tensor in memory at a time; nothing of it is proved here.

    Args:
        student: INT4 folder; its grid is kept, and everything that is not quantised.
        checkpoint: folder with the latents that were trained on that grid.
        sidecars: folder with the tokenizer, chat template and generation files.
        destination: folder to write into.
        log: gets the progress.

    Returns:
        What was packed, to be compared with what was written.

    Raises:
        UserError: student and checkpoint do not fit together, or either is damaged; see :class:`Latents`.
    """
    tensors = Tensors(student)
    modules = quantized_modules(tensors)
    dense = unquantized(student, tensors, modules)
    check_fused(student, modules, dense)
    latents = Latents(Tensors(checkpoint), tensors, modules, dense)
    save_quantized(
        destination,
        modules=latents.packed(log),
        others=passthrough_streams(tensors),
        config=read_config(student),
        ignore=dense,
        sidecars=sidecars,
    )
    return latents
