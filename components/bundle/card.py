"""The model card of a bundle."""

import shlex
from pathlib import Path
from typing import Any

from components.bundle.fit import Shape, read_config
from components.bundle.window import window_of
from components.serving.arguments import arguments
from components.serving.profiles import DRAFT_FOLDER, Serving

_UNSTATED = "not stated in the recipe; lineage.json names the source"


def card(folder: Path, serving: Serving, shape: Shape, ancestors: dict[str, Any], sources: dict[str, str]) -> str:
    """Return the card in Markdown: what it is, how to serve it by hand, where it comes from, licences."""
    name = serving.served_model_name
    stages = "\n".join(
        f"| {entry['stage']} | `{digest[:16]}` |"
        for digest, entry in sorted(ancestors["artifacts"].items(), key=lambda item: item[1]["stage"])
    )
    said = {key: value or _UNSTATED for key, value in sources.items()}
    return f"""# {name}

A target model and a DFlash drafter for speculative decoding, made by qdflash after "Quantize the Target, Quantize the
Drafter" (arXiv 2607.04244). The drafter proposes {shape.block_size - 1} tokens a step from the target's hidden states;
the target verifies them.

- Target, at the root: {_weights(folder)}
- Drafter, in `{DRAFT_FOLDER}/`: {_weights(folder / DRAFT_FOLDER)}; reads target layers {list(shape.taps)}
  (counted from 0), mask token {shape.mask_token}; {_attention(folder / DRAFT_FOLDER)}

## Serve it

With plain vLLM, from inside this folder ({_choice(serving)}; all profiles are in `serving.yaml`):

{_commands(serving)}
Prefix caching stays off where the profile says so: with a hybrid target it corrupts speculative output.

## Where it comes from

- Base model: {said["base_model"]}; licence: {said["base_model_licence"]}
- Prompts: {said["data"]}; licence: {said["data_licence"]}
- The licences of model and data go on to what is derived from them. Do not redistribute answers regenerated from gated
  data.

Everything that led here, with configs and inputs, is in `lineage.json`:

| stage | digest |
|---|---|
{stages}

Check the files with `sha256sum -c SHA256SUMS`.
"""


def _attention(draft: Path) -> str:
    window = window_of(draft)
    return "full attention" if window is None else f"attention within {window} tokens, in both directions"


def _weights(folder: Path) -> str:
    config = read_config(folder)
    quantised = config.get("quantization_config")
    if not quantised:
        return f"{config.get('dtype') or config.get('torch_dtype') or 'unquantised'} weights"
    groups = [group["weights"] for group in quantised.get("config_groups", {}).values()]
    kinds = ", ".join(f"INT{one['num_bits']} weights in groups of {one['group_size']}" for one in groups)
    return f"{kinds} ({quantised.get('quant_method')})"


def _choice(serving: Serving) -> str:
    return "profiles " + ", ".join(serving.profiles)


def _commands(serving: Serving) -> str:
    blocks = []
    for name, profile in serving.profiles.items():
        argv = arguments(profile, ".", DRAFT_FOLDER, served_model_name=serving.served_model_name)
        words = [f"{key}={shlex.quote(value)}" for key, value in profile.env.items()]
        command = shlex.join(argv)
        blocks.append(f"`{name}`:\n\n```sh\n{' '.join([*words, command])}\n```\n")
    return "\n".join(blocks)
