import math

import gdn
import torch


def test_the_repaired_kernel_is_the_gradient_of_its_formula():
    batch, chunks, size, heads, keys, values = 2, 3, 8, 2, 4, 5
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens = chunks * size
    q, k, w = (draw(batch, tokens, heads, keys).requires_grad_() for _ in range(3))
    v, do, dv = (draw(batch, tokens, heads, values) for _ in range(3))
    h, dh = (draw(batch, chunks, heads, keys, values) for _ in range(2))
    g = -draw(batch, chunks, size, heads).abs().cumsum(2).flatten(1, 2).requires_grad_()
    scale, total = 0.3, torch.zeros((), dtype=torch.float64)
    for b in range(batch):
        for c in range(chunks):
            at = slice(c * size, (c + 1) * size)
            for head in range(heads):
                query, key, weight, value = (tensor[b, at, head] for tensor in (q, k, w, v))
                decay, state = g[b, at, head], h[b, c, head]
                within = torch.tril(query @ key.T * torch.exp2(decay[:, None] - decay[None, :]))
                out = scale * (torch.exp2(decay)[:, None] * (query @ state) + within @ value)
                after = torch.exp2(decay[-1]) * state + (torch.exp2(decay[-1] - decay)[:, None] * key).T @ value
                total = total + (out * do[b, at, head]).sum() + (after * dh[b, c, head]).sum()
                total = total - (weight @ state * dv[b, at, head]).sum()
    *expected, by_binary_logarithm = torch.autograd.grad(total, (q, k, w, g))
    expected.append(by_binary_logarithm / math.log(2))
    with torch.no_grad():
        found = gdn.chunk_bwd_dqkwg(q, k, v, do, h, dh, w, g, dv, scale, chunk_size=size)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
