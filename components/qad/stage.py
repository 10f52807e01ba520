"""Teacher, INT4 student and sequences to latents on the student's own grid."""

from functools import partial
from typing import Any, Literal

from pydantic import Field, model_validator

from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig, runtime
from components.contract.stage import Port

ROLE = "train"
VERSION = 2
INPUTS = {
    "teacher": Port("the dense model folder whose predictions are matched"),
    "student": Port("the INT4 W4A16 compressed-tensors folder: start, grid, and everything that does not train"),
    "sequences": Port("token sequences with loss masks"),
}
OUTPUTS = {
    "checkpoints/step-N/latents.safetensors": "<module>.weight as the forward quantised it, .weight_scale as stored",
    "curve.jsonl": "per step: loss, grad_norm, lr, tokens_per_second; at times kl, top1_agreement, codes_changed",
    "tensorboard/": "the same numbers as TensorBoard events",
}


class Config(StageConfig):
    """How the latents are trained. A step's loss is the mean over the valid tokens of its whole batch."""

    steps: int = Field(8000, description="Optimizer steps", ge=1)
    batch: int = Field(16, description="Sequences per optimizer step", ge=1)
    micro_batch: int = runtime(1, "Sequences per forward pass; divides batch", ge=1)
    learning_rate: float = Field(2e-6, description="Peak learning rate", gt=0)
    warmup_ratio: float = Field(
        0.03, description="Share of the steps with a linearly rising rate; cosine to 0 after", ge=0, lt=1
    )
    max_grad_norm: float = Field(1.0, description="Clip to this global norm of the mean loss's gradient", gt=0)
    optimizer: Literal["adamw", "adamw8bit"] = Field(
        "adamw8bit",
        description="AdamW with moments of 8 bits in blocks (bitsandbytes, on a GPU), or of 32, which a CPU needs",
    )
    temperature: float = Field(1.0, description="Divides both models' logits; the loss has no T² factor", gt=0)
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16",
        description="Type of both models' computation and of the latents as quantised and stored; masters are fp32",
    )
    evaluate_every: int = Field(200, description="Steps between held-out evaluations", ge=1)
    evaluation_sequences: int = Field(
        16, description="First so many val sequences are the fixed held-out subset", ge=1
    )
    checkpoint_every: int = Field(1000, description="Steps between checkpoints; the last step always is one", ge=1)
    state_every: int = runtime(250, "Steps between saves of the training state that a killed run continues from", ge=1)
    recompute_activations: bool = runtime(
        False, "Keep one layer's activations at a time for the backward pass, and compute them twice"
    )
    processes: int = runtime(
        0, "Processes that share each step's batch, one per GPU; 0: as many as GPUs, or one", ge=0
    )
    cache_teacher: bool = runtime(
        False,
        "Keep the teacher's hidden states on local disk (for a token as many numbers as its hidden size): each "
        "sequence passes it once",
    )
    seed: int = Field(42, description="Seed of the order of sequences", ge=0)

    @model_validator(mode="after")
    def _batches_split(self) -> "Config":
        if self.batch % (self.micro_batch * (self.processes or 1)):
            on = f" on {self.processes} processes" if self.processes > 1 else ""
            raise ValueError(f"batch {self.batch} is not a multiple of micro_batch {self.micro_batch}{on}")
        return self


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Train, writing checkpoints and ``curve.jsonl``; return what it gained."""
    import torch

    from components.qad.train import train
    from components.training.parallel import started

    teacher, student, sequences = (inputs[port].path for port in INPUTS)
    work = partial(train, config, teacher, student, sequences, output.scratch)
    processes = config.processes or max(1, torch.cuda.device_count())
    with started(processes, output.scratch, partial(work, None)) as ranks:
        return work(None if ranks.rank else output, ranks, output.work)
