import pytest
import torch

from components.serving import grouped_norm


@pytest.mark.slow
def test_every_group_has_its_own_weight(monkeypatch):
    from vllm import _custom_ops

    monkeypatch.setattr(_custom_ops, "rms_norm", _custom_ops.rms_norm)
    grouped_norm.repair()
    torch.manual_seed(0)
    for shape, weight in (((3, 5, 2, 32), torch.rand(3, 32) + 0.5), ((7, 64), torch.rand(64))):
        values = torch.randn(shape)
        out = torch.empty_like(values)
        _custom_ops.rms_norm(out, values, weight, 1e-6)
        scale = weight[:, None, None].double() if weight.ndim > 1 else weight.double()
        wanted = values.double() * (values.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale
        torch.testing.assert_close(out, wanted.float())
