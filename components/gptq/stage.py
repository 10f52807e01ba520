"""The gptq stage: its ports, its knobs, and the order in which its parts run."""

from typing import Any, Literal

from pydantic import Field

from components.chats.rows import read_rows
from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig
from components.contract.errors import UserError
from components.contract.stage import Port

ROLE = "train"
VERSION = 1
INPUTS = {
    "drafter": Port("the trained DFlash drafter (drafter)"),
    "target": Port("the model folder it drafts for, dense or W4A16"),
    "chats": Port("chats that this target answered (regen)"),
}
OUTPUTS = {
    "config.json": "the drafter's config with its quantization_config",
    "model.safetensors": "packed codes, scales and shapes of every linear; norms and vocabulary as in the drafter",
}


class Config(StageConfig):
    """Knobs of the gptq stage."""

    group_size: Literal[32, 64, 128] = Field(128, description="Input columns that share one scale")
    damping: float = Field(0.01, gt=0, lt=1, description="Share of the Hessian's mean diagonal added to it")
    actorder: Literal["static", "none"] = Field(
        "static", description="static: columns in order of activation, groups as stored; none: natural order"
    )
    conversations: int = Field(256, ge=1, description="Most conversations to calibrate on, chosen by row id")
    anchors: int = Field(16, ge=1, description="Anchors per conversation, spread evenly over the answer")
    max_length: int = Field(3072, ge=8, description="Tokens of a conversation that are used")
    held_out: float = Field(
        0.02, gt=0, lt=1, description="Share of the chats for the evaluation; the drafter stage's, so it saw none"
    )
    evaluation_anchors: int = Field(64, ge=1, description="Anchors per held-out chat, spread evenly")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Compute type of target and drafter; Hessians are float32"
    )


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Calibrate, quantise, write, read back and evaluate; return errors, census and acceptance.

    Raises:
        UserError: the three inputs do not fit together, a width the group does not divide, too few rows, or a written
            folder whose quantised modules are not all the drafter's linears.
    """
    raise UserError("gptq: under construction")
