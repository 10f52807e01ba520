"""A drafter's attention window, which its ``config.json`` alone decides: no weight depends on it."""

import json
from pathlib import Path

from components.bundle.fit import drafter_shape, read_config
from components.contract.errors import UserError
from components.store.links import link

OWN_KEYS = ("use_swa", "swa_window_size", "causal")
"""What DFlash's own layout can say of the window in its ``dflash_config``, above everything else."""


def window_of(folder: Path) -> int | None:
    """Return a drafter's attention window in tokens, or None for full attention; of either layout that vLLM loads."""
    config = read_config(folder)
    layer = config.get("transformer_layer_config", config)
    own = config.get("dflash_config", {})
    if "sliding_attention" not in (layer.get("layer_types") or []) and not own.get("use_swa"):
        return None
    window: int = own.get("swa_window_size", layer.get("sliding_window"))
    return window


def with_window(source: Path, destination: Path, window: int | None) -> None:
    """Write the drafter of ``source`` with another window, symmetric, or with full attention for None.

    The other files are linked. vLLM takes a sliding layer for a causal one unless the config says otherwise: it does.

    Raises:
        UserError: the folder is no DFlash drafter, or a block does not fit into the window.
    """
    shape, config = drafter_shape(source), read_config(source)
    if window is not None and window < shape.block_size:
        raise UserError(f"window {window} is smaller than the drafter's block size {shape.block_size}")
    layer = config.get("transformer_layer_config", config)
    kind = "full_attention" if window is None else "sliding_attention"
    layer |= {
        "layer_types": [kind] * layer["num_hidden_layers"],
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }
    if layer is config:
        config["is_causal"] = False
        config["dflash_config"] = {key: value for key, value in config["dflash_config"].items() if key not in OWN_KEYS}
    else:
        config["sliding_window_non_causal"] = True
    destination.mkdir(parents=True, exist_ok=True)
    link(source, destination, leave_out={"config.json"})
    (destination / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
