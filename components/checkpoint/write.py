"""Writes model folders: packed tensors, config.json, tokenizer and generation files."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    QuantizationStrategy,
)
from torch import Tensor

from components.checkpoint.census import ignore_entries
from components.checkpoint.grid import PACKED, SCALE, SHAPE, Quantized, pack_codes
from components.checkpoint.quantize import BITS
from components.checkpoint.shards import MAX_SHARD_BYTES, TensorWriter
from components.checkpoint.stream import Stream
from components.contract.errors import UserError

HEAD = "re:.*lm_head"
"""Target of an output head's config group."""
SIDECARS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)


def save_quantized(
    destination: Path,
    *,
    modules: Iterable[tuple[str, Quantized]],
    others: Iterable[tuple[str, Tensor | Stream]],
    config: dict[str, Any],
    ignore: list[str],
    sidecars: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a compressed-tensors pack-quantized W4A16 folder.

    Args:
        destination: folder to write into; made when missing.
        modules: name and :class:`Quantized`, one at a time; scales are stored as they are.
        others: name and tensor of everything that is not quantised, stored as it is.
        config: the model's config.json; an earlier quantization_config is replaced.
        ignore: names of the linears that are not quantised; see :func:`components.checkpoint.census.unquantized`.
        sidecars: folder whose tokenizer, chat template, generation and preprocessor files are copied.
        max_shard_bytes: size above which another shard is begun.

    Raises:
        UserError: the modules but for the head do not share one group size, or are not INT4.
    """
    destination.mkdir(parents=True, exist_ok=True)
    grids: dict[tuple[int, int], str] = {}
    head = None
    with TensorWriter(destination, max_shard_bytes) as writer:
        for name, tensor in others:
            writer.add(name, tensor)
        for module, quantized in modules:
            if module.endswith("lm_head"):
                head = quantized.bits, quantized.group_size
            else:
                grids.setdefault((quantized.bits, quantized.group_size), module)
                _demand_one_grid(grids, destination)
            words = pack_codes(quantized.codes, quantized.bits) if quantized.words is None else quantized.words
            writer.add(f"{module}.{PACKED}", words)
            writer.add(f"{module}.{SCALE}", quantized.scales)
            writer.add(f"{module}.{SHAPE}", torch.tensor(quantized.codes.shape))
    if not grids:
        raise UserError(f"{destination}: nothing but a head is quantised; an INT4 model has linears of {BITS} bits")
    declared = quantization_config(next(iter(grids))[1], ignore, head)
    write_config(destination, dense_config(config) | {"quantization_config": declared})
    copy_sidecars(sidecars, destination)


def _demand_one_grid(grids: dict[tuple[int, int], str], destination: Path) -> None:
    if len(grids) > 1 or any(bits != BITS for bits, _ in grids):
        found = " and ".join(f"{module} has {bits} bits in groups of {size}" for (bits, size), module in grids.items())
        raise UserError(f"{destination}: {found}; all but the head must have {BITS} bits and one group size")


def quantization_config(group_size: int, ignore: list[str], head: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return a symmetric INT4 weight-only ``quantization_config``, made from the library's own classes.

    ``ignore`` are the linears that stay dense, as stored. A quantised output ``head``, (bits, group size), gets a
    config group of its own: to vLLM it is no ``Linear``.
    """
    grids = {"Linear": (BITS, group_size), **({HEAD: head} if head else {})}
    schemes = [weight_scheme(target, bits, size) for target, (bits, size) in grids.items()]
    config = QuantizationConfig(
        config_groups={f"group_{number}": scheme for number, scheme in enumerate(schemes)},
        format="pack-quantized",
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=ignore_entries(ignore),
    )
    return config.model_dump(mode="json")


def weight_scheme(target: str, bits: int, group_size: int) -> QuantizationScheme:
    """Return the library's symmetric weight-only group scheme for one target."""
    weights = QuantizationArgs(
        num_bits=bits, type="int", symmetric=True, strategy=QuantizationStrategy.GROUP, group_size=group_size
    )
    return QuantizationScheme(targets=[target], weights=weights, format="pack-quantized")


def dense_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json without its quantization_config."""
    dense = {key: value for key, value in config.items() if key != "quantization_config"}
    if "text_config" in dense:
        dense["text_config"] = dense_config(dense["text_config"])
    return dense


def untied_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json whose output head has a tensor of its own."""
    untied = config | {"tie_word_embeddings": False}
    if "text_config" in untied:
        untied["text_config"] = untied_config(untied["text_config"])
    return untied


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write ``config.json``."""
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def copy_sidecars(source: Path, destination: Path) -> None:
    """Copy the tokenizer, chat template, generation and preprocessor files that ``source`` has."""
    for name in SIDECARS:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)
