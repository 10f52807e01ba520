"""Which linears of a model are quantised and which are not, by their stored names."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from components.checkpoint.tensors import Tensors
from components.contract.errors import UserError

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Linears that serving engines fuse into one matrix, which has one format."""

_TEXT_PREFIX = ("model.language_model.", "model.")


def compare(found: Iterable[str], expected: Iterable[str], what: str) -> None:
    """Demand two equal sets of module names, naming the differences both ways."""
    found, expected = set(found), set(expected)
    if found != expected:
        raise UserError(f"{what}: missing {_few(expected - found)}; unexpected {_few(found - expected)}")


def unquantized(folder: Path, tensors: Tensors, quantized: Iterable[str]) -> list[str]:
    """Return the linears that stay dense: what ``ignore`` must list, no more and no less.

    These are the architecture's ``nn.Linear`` modules (an output head also when it is tied and has no tensor of its
    own), and every other stored matrix that is no embedding table: a router of experts, which engines make a linear,
    and what the architecture does not know (a multi-token-prediction module).
    """
    kinds = {_stored_name(name, tensors): type(one) for name, one in skeleton(folder).named_modules()}
    linears = {name for name, kind in kinds.items() if issubclass(kind, nn.Linear)}
    matrices = {
        name.removesuffix(".weight") for name in tensors if name.endswith(".weight") and len(tensors.shape(name)) == 2
    }
    tables = {name for name in matrices if issubclass(kinds.get(name, object), nn.Embedding)}
    return sorted((linears | matrices - tables) - set(quantized))


def ignore_entries(dense: Iterable[str]) -> list[str]:
    """Return what ``ignore`` lists of linears that stay dense: their names in every tree they are loaded into.

    A reader matches entries with the names of the model that it builds: the text model alone, which transformers also
    loads from a multimodal checkpoint, lacks the ``language_model`` part of them.
    """
    dense = set(dense)
    return sorted(dense | {name.replace(*_TEXT_PREFIX, 1) for name in dense})


def check_fused(folder: Path, quantized: Iterable[str], dense: Iterable[str]) -> None:
    """Demand that the linears of a folder which an engine fuses are quantised together or not at all.

    Raises:
        UserError: naming the folder, and the module on whose side its siblings are not.
    """
    quantized, dense = set(quantized), set(dense)
    for module in sorted(quantized):
        parent, _, name = module.rpartition(".")
        for family in FUSED:
            if name in family and (split := [f"{parent}.{other}" for other in family if f"{parent}.{other}" in dense]):
                raise UserError(
                    f"{folder}: {module} is quantised but {', '.join(split)} not; they are fused when served"
                )


def locate(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """Map stored module names to names in a loaded model; modules that it does not have (MTP, vision) are left out.

    A text model loaded from a multimodal checkpoint lacks the ``language_model`` part of the name.
    """
    present = {name for name, _ in model.named_modules()}
    found = {}
    for name in stored:
        for candidate in (name, name.replace(*_TEXT_PREFIX, 1)):
            if candidate in present:
                found[name] = candidate
                break
    return found


def stored_modules(model: nn.Module, tensors: Tensors) -> set[str]:
    """Return the names of a model's modules as the folder's tensors spell them."""
    return {_stored_name(name, tensors) for name, _ in model.named_modules()}


def skeleton(folder: Path) -> nn.Module:
    """Return the architecture that a folder's config names, without memory for its weights."""
    config: Any = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    architecture = architecture_of(config)
    with torch.device("meta"):
        model: nn.Module = architecture(config) if architecture else AutoModelForCausalLM.from_config(config)
    return model


def architecture_of(config: Any) -> Any:
    """Return the class of transformers that a config names first, or None: multimodal models whole, not their text."""
    found = getattr(transformers, (config.architectures or [""])[0], None)
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def _stored_name(name: str, tensors: Tensors) -> str:
    stored, loaded = _TEXT_PREFIX
    prefixed = name.replace(loaded, stored, 1) if name.startswith("model.") else name
    if any(tensor.startswith(f"{prefixed}.") for tensor in tensors):
        return prefixed
    return name


def _few(names: set[str], limit: int = 5) -> str:
    shown = ", ".join(sorted(names)[:limit]) or "none"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
