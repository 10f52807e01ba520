"""Serving profiles: the vLLM arguments of one accelerator, and the ``serving.yaml`` that keeps them in a bundle."""

import re
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError

from components.contract.digest import StageConfig
from components.contract.errors import UserError
from components.contract.faults import explain

SERVING_FILE = "serving.yaml"
DRAFT_FOLDER = "draft"
SUMS_FILE = "SHA256SUMS"

# A bundle may be a stranger's. Its variables tune what computes; none loads a file, carries a key or opens a route.
_TUNES = re.compile(r"(VLLM|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|FLASHINFER|CUDA|NCCL|OMP|MKL)_[A-Z0-9_]+")
_OPENS = re.compile(r"VLLM_(API_KEY|PLUGINS|SERVER_DEV_MODE|ALLOW_INSECURE\w*|ALLOW_RUNTIME\w*)")


def _tunes(name: str) -> str:
    if not _TUNES.fullmatch(name) or _OPENS.fullmatch(name):
        raise ValueError("only variables that tune vLLM, torch, Triton, CUDA, NCCL or OpenMP may be set")
    return name


VariableName = Annotated[str, AfterValidator(_tunes)]
VariableValue = Annotated[str, Field(pattern=r"^[^/\x00]*$")]


class Profile(StageConfig):
    """vLLM arguments that suit one accelerator; ``None`` leaves a choice to vLLM."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", description="Activation dtype")
    max_model_len: int | None = Field(None, description="Longest prompt plus answer, in tokens", ge=16)
    max_num_seqs: int = Field(1, description="Sequences decoded at the same time", ge=1)
    max_num_batched_tokens: int | None = Field(None, description="Most tokens of one forward pass", ge=1)
    enforce_eager: bool = Field(False, description="No compilation and no CUDA graphs: a faster start")
    enable_prefix_caching: bool = Field(
        False, description="Reuse the KV cache of common prefixes; must stay off for hybrid targets"
    )
    gpu_memory_utilization: float | None = Field(None, description="Share of the GPU's memory to take", gt=0, le=1)
    attention_backend: str | None = Field(
        None, description="Attention backend of target and drafter, e.g. FLASH_ATTN", pattern=r"^[A-Z0-9_]+$"
    )
    language_model_only: bool = Field(False, description="Leave out a multimodal model's vision encoder")
    num_speculative_tokens: int | None = Field(
        None, description="Tokens drafted a step; none means the drafter's block size - 1", ge=1
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = Field(
        None, description="Batch sizes (in tokens) captured as CUDA graphs; a bundle sets 1 and 1 + drafted tokens"
    )
    env: dict[VariableName, VariableValue] = Field({}, description="Variables that tune the server process; no paths")


# Two of these save most of a CPU start: eager execution together with an explicit KV cache size needs no warm-up pass.
# The automatic thread binding takes one logical CPU a core and keeps one back; unbound threads use all of them.
# Without vLLM's multiprocessing the engine runs the model in its own process: otherwise it starts one more interpreter
# and polls for its answers, which takes most of a core.
CPU = Profile(
    dtype="auto",
    max_model_len=2048,
    max_num_seqs=32,
    enforce_eager=True,
    env={
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    },
)
A10G = Profile(
    max_model_len=8704,
    max_num_seqs=1,
    max_num_batched_tokens=16384,
    gpu_memory_utilization=0.78,
    attention_backend="FLASH_ATTN",
    language_model_only=True,
)
H200 = Profile(
    max_model_len=8704,
    max_num_seqs=1,
    max_num_batched_tokens=16384,
    gpu_memory_utilization=0.85,
    attention_backend="FLASH_ATTN",
    language_model_only=True,
)
A10G_THROUGHPUT = A10G.model_copy(update={"max_model_len": 16384, "max_num_seqs": 16})
# An H200's 143,771 MiB at an eighth are an A10G's 23,028 at 0.78: as much memory, and nothing else of an A10G.
A10G_EMULATED = A10G.model_copy(update={"gpu_memory_utilization": 0.125})
PROFILES = {
    "cpu": CPU,
    "a10g": A10G,
    "a10g-throughput": A10G_THROUGHPUT,
    "a10g-emulated": A10G_EMULATED,
    "h200": H200,
}


class Serving(StageConfig):
    """What ``serving.yaml`` holds: the served name and one profile per accelerator."""

    served_model_name: str = Field(
        "qdflash", description="Model name that clients ask for", pattern=r"^[A-Za-z0-9][\w./:-]*$"
    )
    profiles: dict[str, Profile] = Field(PROFILES, description="vLLM arguments by accelerator", min_length=1)

    def profile(self, name: str) -> Profile:
        """Return one profile; an unknown name is a :class:`UserError` that lists the known ones."""
        if name not in self.profiles:
            raise UserError(f"serving profile {name!r}: unknown; choose one of {', '.join(sorted(self.profiles))}")
        return self.profiles[name]


def read_serving(folder: Path) -> Serving:
    """Read ``folder/serving.yaml``; raises :class:`UserError` naming the file and the wrong field."""
    return load_serving(folder / SERVING_FILE)


def load_serving(path: Path) -> Serving:
    """Read one ``serving.yaml``; raises :class:`UserError` naming the file and the wrong field."""
    try:
        return Serving.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing; this folder is not a bundle") from error
    except ValidationError as error:
        raise UserError(f"{path}: {'; '.join(explain(error, Serving))}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: not YAML: {error}") from error


def write_serving(folder: Path, serving: Serving) -> None:
    """Write ``folder/serving.yaml`` with every argument spelled out."""
    text = yaml.safe_dump(serving.model_dump(mode="json"), sort_keys=False)
    (folder / SERVING_FILE).write_text(text)
