"""Sampling under a drafter: each drafted token is sampled with its own row's values."""

import pytest
import torch

from components.serving import sampled_drafts

pytestmark = pytest.mark.slow
PROMPT = [5, 17, 42, 99, 7, 250]


@pytest.mark.parametrize(
    ("values", "replaced"),
    [
        (torch.tensor([0.7, 0.0, 1.3]), 1),
        (torch.tensor([20, 0, 3], dtype=torch.int32), 50),
        (torch.tensor([1, 0, 2]), 9),
    ],
    ids=["float32", "int32", "int64"],
)
def test_every_type_arrives(values: torch.Tensor, replaced: int, monkeypatch: pytest.MonkeyPatch):
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample.ops import topk_topp_sampler

    monkeypatch.setattr(cpu_triton_utils, "_expand_kernel_impl", cpu_triton_utils._expand_kernel_impl)
    monkeypatch.setattr(topk_topp_sampler, "apply_top_k_only", topk_topp_sampler.apply_top_k_only)
    sampled_drafts.repair()
    output = torch.full((6,), -99, dtype=values.dtype)
    cpu_triton_utils._expand_kernel_impl(output, values, torch.tensor([1, 4, 6], dtype=torch.int32), 0, replaced)
    first, _, last = values.tolist()
    assert output.tolist() == [first, replaced, replaced, replaced, last, last]


def test_with_a_drafter_the_top_token_alone_is_the_greedy_answer(server):
    greedy = server.client.complete(PROMPT, max_tokens=24, ignore_eos=True)
    sampled = server.client.complete(PROMPT, max_tokens=24, ignore_eos=True, temperature=1.0, top_k=1, seed=3)
    assert sampled.token_ids == greedy.token_ids


def test_with_a_drafter_samples_come_from_the_likeliest_tokens(server):
    answers = [
        server.client.complete(PROMPT, max_tokens=12, ignore_eos=True, temperature=0.7, top_k=4, seed=seed, logprobs=4)
        for seed in range(8)
    ]
    assert len({tuple(answer.token_ids) for answer in answers}) > 1
    for answer in answers:
        for token, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
            assert token in sorted(logprobs, key=logprobs.__getitem__)[-4:]
