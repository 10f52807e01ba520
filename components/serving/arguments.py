"""From a profile to the exact ``vllm serve`` command line and environment."""

import json
from pathlib import Path
from typing import Any

from components.contract.errors import UserError
from components.serving.profiles import Profile

OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def arguments(
    profile: Profile,
    model: str | Path,
    draft: str | Path | None = None,
    *,
    served_model_name: str = "qdflash",
    host: str = "127.0.0.1",
    port: int = 8000,
) -> list[str]:
    """Return ``["vllm", "serve", …]`` for a model folder, with its drafter when ``draft`` is given.

    An API key never appears in the arguments: vLLM reads it from ``VLLM_API_KEY``. Without
    ``profile.num_speculative_tokens`` the drafter's ``config.json`` is read for its block size.
    """
    argv = ["vllm", "serve", str(model), "--served-model-name", served_model_name, "--host", host, "--port", str(port)]
    argv += ["--dtype", profile.dtype, "--max-num-seqs", str(profile.max_num_seqs)]
    argv += ["--enable-prefix-caching" if profile.enable_prefix_caching else "--no-enable-prefix-caching"]
    for flag, value in (
        ("--max-model-len", profile.max_model_len),
        ("--max-num-batched-tokens", profile.max_num_batched_tokens),
        ("--gpu-memory-utilization", profile.gpu_memory_utilization),
        ("--attention-backend", profile.attention_backend),
    ):
        if value is not None:
            argv += [flag, str(value)]
    if profile.enforce_eager:
        argv.append("--enforce-eager")
    if profile.language_model_only:
        argv.append("--language-model-only")
    if profile.cudagraph_capture_sizes:
        argv += ["--cudagraph-capture-sizes", *map(str, profile.cudagraph_capture_sizes)]
    if draft is not None:
        argv += ["--speculative-config", json.dumps(speculative_config(profile, draft))]
    return argv


def speculative_config(profile: Profile, draft: str | Path) -> dict[str, Any]:
    """Return vLLM's ``speculative_config`` for a DFlash drafter folder."""
    tokens = profile.num_speculative_tokens or block_size(Path(draft)) - 1
    config: dict[str, Any] = {"method": "dflash", "model": str(draft), "num_speculative_tokens": tokens}
    if profile.attention_backend:
        config["attention_backend"] = profile.attention_backend
    return config


def block_size(draft: Path) -> int:
    """Return the anchor plus the drafted positions of one block, from the drafter's ``config.json``."""
    path = draft / "config.json"
    try:
        size = json.loads(path.read_text()).get("block_size")
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing; {draft} is not a drafter folder") from error
    if not isinstance(size, int) or size < 2:
        raise UserError(f"{path}: block_size is {size!r}; a DFlash drafter needs an integer of at least 2")
    return size


def environment(profile: Profile) -> dict[str, str]:
    """Return the variables to add to a server's environment: offline, no usage reports, the profile's own.

    vLLM compiles a few helpers (the first request with logprobs needs one) even with ``--enforce-eager``; on a CPU
    that is a C++ compiler run of a minute in the middle of a request, so eager profiles switch it off.
    """
    eager = {"TORCH_COMPILE_DISABLE": "1"} if profile.enforce_eager else {}
    return {**OFFLINE, **eager, **profile.env}
