"""The quantised drafter's folder: written in the layout vLLM loads, and read back for its evaluation."""

from collections.abc import Iterable
from pathlib import Path

import torch
from speculators.models.dflash.core import DFlashDraftModel
from torch import nn

from components.checkpoint.census import compare
from components.checkpoint.config import read_config
from components.checkpoint.grid import quantized_modules
from components.checkpoint.tensors import Tensors
from components.checkpoint.unpack import dense_tensors
from components.checkpoint.write import save_quantized
from components.contract.errors import UserError
from components.drafter import model
from components.gptq.sequence import Result

HEAD = "lm_head"


def write(result: Result, source: Path, destination: Path) -> None:
    """Write the drafter of ``source`` with its linears packed; other tensors and its config stay as they are.

    ``ignore`` lists a trimmed output head, the one linear stored in bfloat16, and is empty where the head is shared.
    """
    tensors = Tensors(source)
    weights = {f"{name}.weight" for name in result.quantized}
    save_quantized(
        destination,
        modules=result.quantized.items(),
        others=((name, result.changed.get(name, tensors[name])) for name in tensors if name not in weights),
        config=read_config(source),
        ignore=[HEAD] if f"{HEAD}.weight" in tensors else [],
        sidecars=source,
    )


def check_census(folder: Path, expected: Iterable[str]) -> int:
    """Demand that exactly these modules are quantised in a folder, and no other matrix is stored but a trimmed head.

    Returns:
        How many are quantised.

    Raises:
        UserError: naming what is missing or unexpected.
    """
    tensors = Tensors(folder)
    found = quantized_modules(tensors)
    dense = {
        name.removesuffix(".weight")
        for name in tensors
        if name.endswith(".weight") and len(tensors.shape(name)) == 2 and name != f"{HEAD}.weight"
    }
    compare([*found, *dense], expected, f"census of {folder}")
    compare(dense, [], f"matrices that {folder} stores unquantised")
    return len(found)


def read(folder: Path, target: nn.Module) -> DFlashDraftModel:
    """Load a quantised drafter with dense weights (codes × scales, exactly) and the target's embedding and head.

    Raises:
        UserError: tensors are missing or unknown.
    """
    drafter = model.attach(model.read(folder), target)
    weights = model.trained_parameters(drafter)
    shared = {"t2d", "d2t", f"{HEAD}.weight"}
    tensors = {name: tensor for name, tensor in dense_tensors(folder, torch.float32) if name not in shared}
    if odd := sorted(set(tensors) ^ set(weights)):
        raise UserError(f"drafter {folder}: tensors missing or unknown: {', '.join(odd[:4])}")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(tensors[name])
    return drafter
