"""Writes model folders: safetensors (with an index above 5 GB), config.json, tokenizer and generation files."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    QuantizationStrategy,
)
from safetensors.torch import save_file
from torch import Tensor

from components.checkpoint.grid import PACKED, SCALE, SHAPE, Quantized
from components.checkpoint.quantize import BITS
from components.checkpoint.tensors import INDEX
from components.contract.errors import UserError

MAX_SHARD_BYTES = 5 * 10**9
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


class TensorWriter:
    """Streams tensors into safetensors shards; at most one shard is in memory.

    One shard is called ``model.safetensors``; several get numbered names and an index.
    """

    def __init__(self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._folder = folder
        self._limit = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            self._finish()

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor; a name may be given once."""
        if name in self._pending or any(name in shard for shard in self._shards):
            raise ValueError(f"{name} is written twice")
        size = tensor.nbytes
        if self._pending and self._pending_bytes + size > self._limit:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size

    def _flush(self) -> None:
        save_file(self._pending, self._folder / _part(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _finish(self) -> None:
        self._flush()
        count = len(self._shards)
        if count == 1:
            (self._folder / _part(0)).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            final = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / _part(number)).rename(self._folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def save_quantized(
    destination: Path,
    *,
    modules: Iterable[tuple[str, Quantized]],
    others: Iterable[tuple[str, Tensor]],
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
    grids: set[tuple[int, int]] = set()
    head = None
    with TensorWriter(destination, max_shard_bytes) as writer:
        for name, tensor in others:
            writer.add(name, tensor)
        for module, quantized in modules:
            writer.add(f"{module}.{PACKED}", pack_to_int32(quantized.codes, quantized.bits))
            writer.add(f"{module}.{SCALE}", quantized.scales)
            writer.add(f"{module}.{SHAPE}", torch.tensor(quantized.codes.shape))
            if module.endswith("lm_head"):
                head = quantized.bits, quantized.group_size
            else:
                grids.add((quantized.bits, quantized.group_size))
    if len(grids) != 1 or next(iter(grids))[0] != BITS:
        found = " and ".join(f"{bits} bits in groups of {size}" for bits, size in sorted(grids))
        raise UserError(
            f"{destination}: modules of {found}; all but the head must have {BITS} bits and one group size"
        )
    declared = quantization_config(grids.pop()[1], ignore, head)
    write_config(destination, dense_config(config) | {"quantization_config": declared})
    copy_sidecars(sidecars, destination)


def quantization_config(group_size: int, ignore: list[str], head: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return a symmetric INT4 weight-only ``quantization_config``, made from the library's own classes.

    A quantised output ``head``, (bits, group size), gets a config group of its own: to vLLM it is no ``Linear``.
    """
    grids = {"Linear": (BITS, group_size), **({HEAD: head} if head else {})}
    schemes = [weight_scheme(target, bits, size) for target, (bits, size) in grids.items()]
    config = QuantizationConfig(
        config_groups={f"group_{number}": scheme for number, scheme in enumerate(schemes)},
        format="pack-quantized",
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=sorted(ignore),
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


def _part(number: int) -> str:
    return f".part-{number:05d}.safetensors"
