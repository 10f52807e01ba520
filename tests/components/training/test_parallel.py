from functools import partial
from pathlib import Path

import pytest
import torch

from components.training.parallel import Ranks, Shares, balanced, started


def test_masters_are_shared_out_evenly_and_once():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 1000, (200,), generator=generator).tolist()
    masters = {f"m{index}": torch.nn.Parameter(torch.zeros(size)) for index, size in enumerate(sizes)}
    shares = [Shares(masters, Ranks(rank, 3)).owned for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(masters)
    loads = [sum(master.numel() for master in share.values()) for share in shares]
    assert max(loads) - min(loads) < max(sizes)


def test_work_of_unequal_size_is_shared_out_evenly():
    """At most a third above the mean (Graham's bound), where taking turns leaves one rank with nearly all."""
    sizes = [3000, 10, 2900, 20, 2800, 30, 2700, 40]
    owners = balanced(sizes, 2)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(2)]
    assert max(loads) <= 1.01 * sum(sizes) / 2 < sum(sizes[::2]) / 1.9
    assert balanced(sizes, 1) == [0] * 8
    assert balanced([7] * 8, 2) == [0, 1] * 4


def test_ranks_know_their_place_on_several_machines():
    places = [Ranks(rank, 6, 3) for rank in range(6)]
    assert [(one.node, one.local) for one in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def bring(folder: Path, ranks: Ranks) -> Path:
    mine = folder / str(ranks.rank)
    mine.mkdir()
    shared = ranks.shared(mine)
    (shared / f"of-{ranks.rank}").touch()
    ranks.meet()
    return shared


@pytest.mark.slow
def test_the_ranks_of_a_machine_share_the_folder_of_its_first(tmp_path):
    """torchrun's processes each bring one of their own."""
    with started(2, tmp_path, partial(bring, tmp_path)) as ranks:
        shared = bring(tmp_path, ranks)
    assert shared == tmp_path / "0"
    assert {one.name for one in shared.iterdir()} == {"of-0", "of-1"}
