"""``config.json`` and its ``quantization_config``: what this project accepts, and what it writes."""

import json
from pathlib import Path
from typing import Any

from components.checkpoint.quantize import BITS
from components.contract.errors import UserError

HEAD_BITS = 8
"""A width that only an output head may have; vLLM has kernels for it on GPUs alone."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return a model folder's ``config.json``."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: missing; this is not a model folder")
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: not JSON; the file is torn") from error
    if not isinstance(config, dict) or not isinstance(config.get("text_config", {}), dict):
        raise UserError(f"{path}: it, or its text_config, is no JSON object; this is no model's config")
    return config


def is_tied(folder: Path) -> bool:
    """Say whether the output head is the embedding table, so that it has no tensor of its own."""
    return bool(read_config(folder).get("tie_word_embeddings", False))


def quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the quantization_config, wherever it stands (multimodal configs may keep it in ``text_config``)."""
    declared = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    if declared and not isinstance(declared, dict):
        raise UserError(f"config.json: quantization_config is {declared!r}, not a JSON object")
    return declared


def declared_grids(folder: Path) -> set[tuple[int, int]]:
    """Return the (bits, group size) a W4A16 folder declares, after checking that it is one; a head may have 8 bits.

    Raises:
        UserError: the folder is not compressed-tensors pack-quantized, or a config group has another width, type or
            strategy, zero points, a dynamic or reordered grid, or quantised activations; the group is named. Or
            weights are sparse or rotated as well.
    """
    path = Path(folder) / "config.json"
    declared = quantization(read_config(folder))
    if declared is None:
        raise UserError(f"{path}: no quantization_config; an INT4 compressed-tensors checkpoint is needed")
    if declared.get("quant_method") != "compressed-tensors":
        method = declared.get("quant_method")
        raise UserError(f"{path}: quant_method is {method}; only compressed-tensors checkpoints are read")
    if declared.get("kv_cache_scheme"):
        raise UserError(f"{path}: kv_cache_scheme is set; only weights may be quantised")
    groups = declared.get("config_groups") or {}
    if not groups:
        raise UserError(f"{path}: quantization_config has no config_groups")
    try:
        if (declared.get("transform_config") or {}).get("config_groups"):
            raise UserError(f"{path}: transform_config is set; weights that are rotated as well are not read")
        if (declared.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise UserError(f"{path}: sparsity_config is set; weights that are sparse as well are not read")
        return {_grid(path, name, group, declared.get("format")) for name, group in groups.items()}
    except (AttributeError, TypeError) as error:
        raise UserError(f"{path}: quantization_config is not what compressed-tensors writes ({error})") from error


def _grid(path: Path, name: str, group: dict[str, Any], default_format: str | None) -> tuple[int, int]:
    where = f"{path}: config group {name} of {', '.join(group.get('targets') or ['nothing'])}"
    if (form := group.get("format") or default_format) != "pack-quantized":
        raise UserError(f"{where}: format is {form}; only pack-quantized is read")
    for activations in ("input_activations", "output_activations"):
        if group.get(activations):
            raise UserError(f"{where}: {activations} are quantised; only W4A16 (weights alone) is supported")
    weights = group.get("weights") or {}
    if weights.get("symmetric") is not True:
        raise UserError(f"{where}: asymmetric (zero points); only symmetric grids are supported")
    bits, head = weights.get("num_bits"), all(target.endswith("lm_head") for target in group.get("targets") or [""])
    if weights.get("type") != "int" or bits not in ((BITS, HEAD_BITS) if head else (BITS,)):
        allowed = f"only {BITS}-bit int, or {HEAD_BITS}-bit in a group whose target is the lm_head"
        raise UserError(f"{where}: {bits}-bit {weights.get('type')} weights; {allowed}")
    if weights.get("strategy") != "group" or not weights.get("group_size") or weights["group_size"] < 1:
        raise UserError(f"{where}: strategy is {weights.get('strategy')}; only group with a group_size is supported")
    if weights.get("dynamic"):
        raise UserError(f"{where}: dynamic weight scales; only stored ones are supported")
    if (order := weights.get("actorder")) not in (None, False, "weight", "static"):
        raise UserError(f"{where}: actorder {order} reorders columns at run time (g_idx); use static or none")
    return int(weights["num_bits"]), int(weights["group_size"])
