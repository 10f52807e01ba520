"""Whether a DFlash drafter belongs to a target: their ``config.json`` files compared."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.contract.errors import UserError


@dataclass(frozen=True)
class Shape:
    """What a drafter takes from its target. ``taps`` are target layers counted from 0."""

    vocabulary: int
    hidden_size: int
    taps: tuple[int, ...]
    mask_token: int
    block_size: int


def read_config(folder: Path) -> dict[str, Any]:
    """Return ``folder/config.json``; raises :class:`UserError` naming the file when there is none or it is torn."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing; this is not a model folder") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON; the file is torn") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds no fields; this is not a model folder")
    return config


def context_length(target: Path) -> int | None:
    """Return the longest sequence that a target's config allows, in tokens; None where it says nothing."""
    config = read_config(target)
    longest: int | None = config.get("text_config", config).get("max_position_embeddings")
    return longest


def drafter_shape(folder: Path) -> Shape:
    """Read a drafter's shape from either layout that vLLM loads.

    speculators' layout counts taps from 1 (``aux_hidden_state_layer_ids``), DFlash's own from 0
    (``dflash_config.target_layer_ids``).
    """
    config = read_config(folder)
    try:
        layer = config.get("transformer_layer_config", config)
        own = config.get("dflash_config", {})
        if "aux_hidden_state_layer_ids" in config:
            taps, mask_token = [tap - 1 for tap in config["aux_hidden_state_layer_ids"]], config["mask_token_id"]
        else:
            taps, mask_token = own["target_layer_ids"], own["mask_token_id"]
        block_size = config["block_size"] if "block_size" in config else own["block_size"]
        numbers = layer["vocab_size"], layer["hidden_size"], *taps, mask_token, block_size
    except KeyError as error:
        raise UserError(f"{folder / 'config.json'}: no {error}; this is not a DFlash drafter") from error
    except TypeError as error:
        raise UserError(f"{folder / 'config.json'}: {error}; this is not a DFlash drafter") from error
    if not all(type(number) is int for number in numbers):
        raise UserError(f"{folder / 'config.json'}: not whole numbers among {numbers}; this is not a DFlash drafter")
    return Shape(layer["vocab_size"], layer["hidden_size"], tuple(taps), mask_token, block_size)


def check_fit(target: Path, draft: Path) -> Shape:
    """Return the drafter's shape, or raise :class:`UserError` with every number that does not fit the target's."""
    config = read_config(target)
    text = config.get("text_config", config)
    shape = drafter_shape(draft)
    try:
        vocabulary, hidden_size, layers = text["vocab_size"], text["hidden_size"], text["num_hidden_layers"]
    except KeyError as error:
        raise UserError(f"{target / 'config.json'}: no {error}; this is not a target model") from error
    faults = []
    if shape.vocabulary != vocabulary:
        faults.append(f"vocabulary {shape.vocabulary}, the target's is {vocabulary}")
    if shape.hidden_size != hidden_size:
        faults.append(f"hidden size {shape.hidden_size}, the target's is {hidden_size}")
    if outside := [tap for tap in shape.taps if not 0 <= tap < layers]:
        faults.append(f"taps {outside} outside the target's layers 0 to {layers - 1}")
    if not shape.taps or len(set(shape.taps)) != len(shape.taps):
        faults.append(f"taps {list(shape.taps)} are not distinct layers")
    if shape.block_size < 2:
        faults.append(f"block size {shape.block_size} leaves nothing to draft after the anchor")
    if not 0 <= shape.mask_token < vocabulary:
        faults.append(f"mask token {shape.mask_token} outside the target's vocabulary of {vocabulary}")
    if faults:
        raise UserError(f"the drafter does not fit the target: {'; '.join(faults)}; train it for this target")
    return shape
