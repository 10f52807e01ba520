import copy

import pytest
import torch

from components.drafter.blocks import lay_out
from components.drafter.data import Chat
from components.drafter.features import TargetFeatures
from components.drafter.forward import block_hidden
from components.gptq.awq import smooth
from components.gptq.calibrate import Calibration
from components.gptq.compare import logits_apart
from components.gptq.quantize import round_to_grid
from components.gptq.sequence import parts

TOKENS = torch.tensor([1, 40, 50, 60, 70, 80, 90, 100, 110, 120, 2])
CHATS = [Chat("a", TOKENS, 4), Chat("b", TOKENS[:8], 3)]
SCALED = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def within(drafter, calibration):
    """The first layer's linears and their Hessians, by name within the layer."""
    linears = {name.removeprefix("layers.0."): linear for name, linear in parts(drafter)[1].items()}
    return linears, calibration.hessians(drafter, linears)


def with_outliers(drafter):
    """A few channels that carry most of what the MLP and the output projection read."""
    with torch.no_grad():
        drafter.layers[0].post_attention_layernorm.weight[::16] = 20
        drafter.layers[0].mlp.up_proj.weight[::16] *= 20
        drafter.layers[0].self_attn.v_proj.weight[::16] *= 20


def test_scaling_keeps_the_function_and_helps_rounding(drafter, target):
    with_outliers(drafter)
    features = [TargetFeatures(target, [0, 2])(chat.token_ids) for chat in CHATS]
    calibration = Calibration(CHATS, features.__getitem__, 4, torch.float32)
    linears, hessians = within(drafter, calibration)
    plain = {name: round_to_grid(linears[name].weight.detach(), hessians[name], 32)[1] for name in SCALED}
    blocks = lay_out([(TOKENS, torch.tensor([4, 7]))], 4)
    with torch.no_grad():
        before = block_hidden(drafter, features[0], blocks)
        norm = smooth(drafter.layers[0], hessians, 32)
        torch.testing.assert_close(block_hidden(drafter, features[0], blocks), before, rtol=1e-4, atol=1e-4)
    assert torch.equal(drafter.layers[0].post_attention_layernorm.weight, norm.float())

    _, measured = within(drafter, calibration)
    for name in SCALED:
        torch.testing.assert_close(hessians[name], measured[name], rtol=1e-3, atol=1e-4)
        assert round_to_grid(linears[name].weight.detach(), hessians[name], 32)[1] < 0.8 * plain[name], name


def test_logits_of_a_drafter_and_itself_are_no_nat_apart_and_of_another_as_float64_says(drafter, target):
    compute = TargetFeatures(target, [0, 2])
    same = logits_apart(drafter, drafter, CHATS, lambda index: compute(CHATS[index].token_ids), 4, torch.float32)
    assert same["kl"] == 0
    assert same["top1_agreement"] == 1
    assert same["slots"] == sum(min(3, 10 - a) for a in (4, 6, 7, 9)) + sum(min(3, 7 - a) for a in (3, 4, 5, 6))

    other = copy.deepcopy(drafter)
    with torch.no_grad():
        other.layers[1].mlp.down_proj.weight.mul_(100)
    found = logits_apart(drafter, other, CHATS[1:], lambda _: compute(CHATS[1].token_ids), 4, torch.float32)
    blocks = lay_out([(CHATS[1].token_ids, torch.tensor([3, 4, 5, 6]))], 4)
    said = []
    for one in (drafter, other):
        with torch.no_grad():
            hidden = block_hidden(one, compute(CHATS[1].token_ids), blocks)
        said.append((hidden.double() @ one.lm_head.weight.double().T).log_softmax(-1))
    apart = (said[0].exp() * (said[0] - said[1])).sum(-1)
    slots = [apart[block, k] for block, anchor in enumerate((3, 4, 5, 6)) for k in range(1, 4) if anchor + k < 8]
    assert found["slots"] == len(slots)
    assert found["kl"] == pytest.approx(float(sum(slots)) / len(slots), rel=1e-3), found["kl"]
