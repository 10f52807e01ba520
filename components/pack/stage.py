"""Declaration of the ``pack`` stage."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig
from components.contract.errors import UserError
from components.contract.stage import Port

ROLE = "train"
VERSION = 5
INPUTS = {
    "qad": Port("distillation checkpoints: latents and scales of the quantised linears; only the chosen one is read"),
    "selected": Port("which of them is packed (select)"),
    "student": Port("INT4 checkpoint that distillation started from: grid, and everything that is not quantised"),
    "model": Port("BF16 model: tokenizer, chat template, generation config"),
    "sequences": Port("token sequences; pieces of the val split prove the logits"),
}
OUTPUTS = {
    "config.json": "model config with its quantization_config",
    "model*.safetensors": "packed codes, the student's scales, shapes; everything else as in the student",
    "census.json": "quantised modules, their shapes and shares of codes that training changed; what is not quantised",
    "tokenizer*": "tokenizer, chat template and generation files of the model",
}


class Config(StageConfig):
    """What the logits are proved on, and what the proof tolerates."""

    max_kl: float = Field(
        1e-4,
        description="Largest mean KL, in nats a token, between the reloaded target and the fake-quantised student; "
        "both compute in dtype, on the same held-out tokens",
        ge=0,
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Type of both models' weights and computation in that comparison"
    )
    proof_tokens: int = Field(512, description="Held-out tokens that are compared, in pieces of 128", ge=1)
    seed: int = Field(42, description="Seed of the draw of the pieces")


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Pack and prove; return the proof's figures."""
    import torch

    from components.checkpoint.tensors import Tensors
    from components.checkpoint.unpack import passthrough_names
    from components.pack.proof import held_out_pieces, logit_difference, prove_end, prove_tensors
    from components.pack.target import write_target
    from components.qad.student import check_pair
    from components.sequences.reader import read_index

    student, sidecars, sequences = (inputs[port].path for port in ("student", "model", "sequences"))
    checkpoint = _checkpoint(inputs, output.scratch)
    check_pair(sidecars, student, read_index(sequences)["vocabulary_size"])
    pieces = held_out_pieces(sequences, config.proof_tokens, config.seed)
    with output.timed("pack"):
        latents = write_target(student, checkpoint, sidecars, output.path, output.log)
    prove_end(output.path)
    with output.timed("prove tensors"):
        changed = prove_tensors(Tensors(output.path), latents, output.log)
    with output.timed("prove logits"):
        difference = logit_difference(output.path, latents, pieces, getattr(torch, config.dtype))
    if not difference["kl"] <= config.max_kl:
        raise UserError(
            f"{output.path}: the packed target differs from the fake-quantised student by {difference['kl']:.3g} nats "
            f"a token, more than max_kl {config.max_kl:.3g}; its logits are not those that training saw"
        )
    quantized = {name: {"shape": list(shape), "codes_changed": share} for name, (shape, share) in changed.items()}
    unchanged = sorted(passthrough_names(latents.student))
    census = {"quantized": quantized, "carried": latents.carried, "dense": latents.dense, "unchanged": unchanged}
    (output.path / "census.json").write_text(json.dumps(census, indent=1) + "\n")
    sizes = {name: shape[0] * shape[1] for name, (shape, _) in changed.items()}
    return {
        "quantized": len(latents.modules),
        "carried": len(latents.carried),
        "dense_linears": len(latents.dense),
        "modules_proved": len(changed),
        "codes_changed": sum(share * sizes[name] for name, (_, share) in changed.items()) / sum(sizes.values()),
        **difference,
    }


def _checkpoint(inputs: Inputs, scratch: Path) -> Path:
    """Fetch the chosen checkpoint's latents and none of the others'; return a folder that holds them."""
    from components.qad.student import FILE

    choice = json.loads(inputs["selected"].file("scores.json").read_text())
    if choice["qad"] != inputs["qad"].digest:
        raise UserError(f"{inputs['selected'].uri}: it chose among the checkpoints of qad/{choice['qad']}, not these")
    folder = scratch / f"step-{choice['chosen']}"
    folder.mkdir()
    (folder / FILE).symlink_to(inputs["qad"].file(f"checkpoints/{folder.name}/{FILE}"))
    return folder
