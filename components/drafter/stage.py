"""The drafter stage: its ports, its knobs, and the order in which its parts run."""

from functools import partial
from typing import Any, Literal

from pydantic import Field, model_validator

from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig, runtime
from components.contract.stage import Port

ROLE = "train"
VERSION = 3
INPUTS = {
    "target": Port("the model folder the drafter drafts for, dense or W4A16"),
    "chats": Port("chats that this target answered (regen)"),
    "init": Port("an earlier drafter to continue from; its architecture, taps and vocabulary are kept", optional=True),
}
OUTPUTS = {
    "config.json": "the drafter's config, in the layout vLLM loads",
    "model.safetensors": "its weights in bfloat16, without the shared embedding and head",
    "curve.jsonl": "loss per step and held-out accept-length per evaluation",
    "scores.json": "accept-length of the untrained, bigram, initial and final drafter, and of every evaluation",
}


class Config(StageConfig):
    """Knobs of the drafter stage."""

    layers: int = Field(5, ge=1, description="Decoder layers of the drafter")
    heads: int | None = Field(None, ge=1, description="Attention heads; null: the target's")
    key_value_heads: int | None = Field(None, ge=1, description="Key/value heads; null: the target's")
    head_dim: int | None = Field(None, ge=8, multiple_of=2, description="Width of a head; null: the target's")
    intermediate_size: int | None = Field(None, ge=8, description="Width of the MLP; null: the target's")
    block_size: int = Field(16, ge=2, description="Slots of a block: the anchor and block_size − 1 drafted tokens")
    taps: int = Field(5, ge=1, description="Tapped target layers, spread by round(1 + i·(L−4)/(n−1))")
    mask_token: int | None = Field(None, ge=0, description="Mask token id; null: the first id that cannot occur")
    draft_vocabulary: int | None = Field(None, ge=2, description="Drafted tokens kept, by frequency; null: all")
    window: int | None = Field(None, ge=1, description="Attention window in tokens, symmetric; null: full attention")
    group_size: int = Field(128, ge=1, description="Group of the later quantisation, which must divide the widths")
    max_length: int = Field(3072, ge=8, description="Tokens of a conversation that are used")
    reasoning: bool = Field(True, description="Train on the answers' reasoning too; false: it is context only")
    held_out: float = Field(0.02, gt=0, lt=1, description="Share of the chats that are evaluated, not trained on")
    anchors: int = Field(512, ge=1, description="Anchors drawn per conversation and step")
    gamma: float = Field(7.0, gt=0, description="Decay of the slots' loss weights, exp(−(k−1)/γ)")
    loss: Literal["cross_entropy", "kl", "d_pace"] = Field(
        "cross_entropy",
        description="Learn the stored tokens, the target's distribution there, or tokens by what they can still earn",
    )
    epochs: int = Field(2, ge=1, description="Passes over the chats")
    batch: int = Field(32, ge=1, description="Conversations per optimiser step")
    learning_rate: float = Field(1e-3, gt=0, description="Peak of the cosine schedule")
    warmup: float = Field(0.04, ge=0, lt=1, description="Share of the steps that warm up")
    clip: float = Field(1.0, gt=0, description="Largest global gradient norm")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Compute type; weights and moments are float32"
    )
    cache_features: bool = Field(True, description="Compute the target's features once, to disk; false: every time")
    evaluate_every: int = Field(1000, ge=1, description="Steps between evaluations; the best one is handed on")
    evaluation_anchors: int = Field(64, ge=1, description="Anchors per held-out chat, spread evenly")
    seed: int = Field(0, ge=0, description="Seed of weights, order and anchors")
    save_every: int = runtime(200, "Steps between stored training states", ge=1)
    micro_batch: int = runtime(1, "Conversations per forward pass", ge=1)
    processes: int = runtime(
        0, "Processes that share each step's batch, one per GPU; 0: as many as GPUs, or one", ge=0
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "Config":
        if self.window is not None and self.window < self.block_size:
            raise ValueError(
                f"window {self.window} is smaller than block_size {self.block_size}: slots would not see each other"
            )
        return self


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Train, evaluate and write the drafter; see ``OUTPUTS`` for the files.

    Raises:
        UserError: chats, target and initial drafter do not fit together, or a width the group does not divide.
    """
    import torch

    from components.drafter.fit import fit
    from components.training.parallel import started

    folders = {port: inputs[port].path for port in INPUTS if port in inputs}
    work = partial(fit, config, folders, output.scratch, output.work)
    processes = config.processes or max(1, torch.cuda.device_count())
    with started(processes, output.scratch, partial(work, None)) as ranks:
        return work(None if ranks.rank else output, ranks)
