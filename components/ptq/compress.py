"""llm-compressor chooses the scales (and, with GPTQ, moves the weights); the codes are ours, divided in fp32."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationArgs
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from components.checkpoint.census import locate
from components.checkpoint.grid import Quantized
from components.checkpoint.load import load_tokenizer
from components.checkpoint.quantize import BITS, dequantize, integer_codes
from components.checkpoint.tensors import Tensors
from components.checkpoint.write import HEAD, weight_scheme
from components.contract.errors import UserError
from components.contract.log import Log


def check_groups(
    model: nn.Module, group_size: int, ignore: list[str], folder: Path, head_group: int | None = None
) -> None:
    """Demand that all parameters are finite, and the inputs of every linear that will be quantised in whole groups."""
    chosen = [
        (name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear) and not _matches(name, ignore)
    ]
    if not chosen:
        raise UserError(f"ignore {ignore}: leaves no linear of {folder} to quantise")
    for name, linear in chosen:
        size = head_group if head_group and name.endswith("lm_head") else group_size
        if linear.in_features % size:
            raise UserError(
                f"{folder}: {name} has {linear.in_features} inputs, which groups of {size} do not divide; "
                "choose another group_size or ignore the module"
            )
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"{folder}: {name} has values that are not finite; the model is damaged")


def with_head(model: PreTrainedModel, ignore: list[str]) -> list[str]:
    """Give the output head a weight of its own, in place; return ``ignore`` without what names it."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    return [pattern for pattern in ignore if not _matches("lm_head", [pattern])]


def choose_scales(
    model: PreTrainedModel,
    group_size: int,
    ignore: list[str],
    batches: "DataLoader[Any] | None",
    damping: float,
    head: tuple[int, int] | None = None,
) -> None:
    """Attach a ``weight_scale`` [out, in / group] to every quantised linear, in place.

    ``head`` is the (bits, group size) of an output head that has its own. Without ``batches`` a scale is the group's
    largest magnitude / 7.5 (127.5 for 8 bits). With them GPTQ (arXiv 2210.17323) runs layer by layer, each on the
    outputs of the quantised layers before it, and leaves on-grid weights.
    """
    groups = {"group_0": weight_scheme("Linear", BITS, group_size)}
    if head:
        groups["group_1"] = weight_scheme(HEAD, *head)
    if batches is None:
        oneshot(model=model, recipe=QuantizationModifier(config_groups=groups, ignore=ignore), pipeline="datafree")
        return
    recipe = GPTQModifier(config_groups=groups, ignore=ignore, dampening_frac=damping)
    tokenizer = load_tokenizer(Path(model.config._name_or_path))
    oneshot(model=model, recipe=recipe, dataset=batches, processor=tokenizer, pipeline="sequential")


def quantized_linears(model: nn.Module, tensors: Tensors) -> dict[str, nn.Module]:
    """Return the modules that got scales, by their stored names."""
    stored = locate(model, (name.removesuffix(".weight") for name in tensors if name.endswith(".weight")))
    stored.setdefault("lm_head", "lm_head")  # a tied head has no tensor of its own
    modules = dict(model.named_modules())
    chosen = {name: modules[inner] for name, inner in stored.items() if hasattr(modules[inner], "weight_scale")}
    return dict(sorted(chosen.items()))


def summarise(
    linears: dict[str, nn.Module], tensors: Tensors, errors: dict[str, float], log: Log
) -> Iterator[tuple[str, Quantized]]:
    """Yield each module's codes and scales; note ‖W − Ŵ‖² / ‖W‖² against the stored weight W in ``errors``."""
    for done, (name, linear) in enumerate(linears.items(), 1):
        weight, scales = linear.weight.detach().cpu(), linear.weight_scale.detach().cpu()
        weights: QuantizationArgs = linear.quantization_scheme.weights
        codes = integer_codes(weight, scales, weights.num_bits)
        stored = f"{name}.weight"
        original = tensors[stored].float() if stored in tensors else weight.float()  # a tied head has none of its own
        difference = original - dequantize(codes, scales).float()
        size = float(original.square().sum())
        errors[name] = float(difference.square().sum()) / size if size else 0.0
        log.progress(done, len(linears), module=name)
        yield name, Quantized(codes, scales, weights.group_size, weights.num_bits)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(
        re.match(pattern.removeprefix("re:"), name) if pattern.startswith("re:") else name == pattern
        for pattern in patterns
    )
