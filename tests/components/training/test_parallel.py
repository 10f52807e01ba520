import torch

from components.training.parallel import Ranks, Shares


def test_masters_are_shared_out_evenly_and_once():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 1000, (200,), generator=generator).tolist()
    masters = {f"m{index}": torch.nn.Parameter(torch.zeros(size)) for index, size in enumerate(sizes)}
    shares = [Shares(masters, Ranks(rank, 3)).owned for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(masters)
    loads = [sum(master.numel() for master in share.values()) for share in shares]
    assert max(loads) - min(loads) < max(sizes)
