"""Features of conversations over two machines that share nothing but the store."""

from functools import partial
from pathlib import Path

import pytest
import torch

from components.drafter import features
from components.drafter.data import Chat
from components.store.backend import Store
from components.store.work import Work
from components.training.parallel import Ranks, started

CHATS = [Chat(str(number), torch.arange(number, 2 * number + 3), 2) for number in range(9)]


class Counted:
    """In place of a target: features that tell a token from another, and how often they were computed."""

    width = 4

    def __init__(self, work: Work, rank: int) -> None:
        self._work, self._rank, self._done = work, rank, 0

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        self._work.put(f"computed/{self._rank}-{self._done}", b"")
        self._done += 1
        return token_ids[:, None] * torch.arange(1.0, 5.0)


def look_up(store: str, folder: Path, ranks: Ranks) -> list[torch.Tensor]:
    """Compute and read as one of two machines, each with its own folder."""
    mine, work = Ranks(ranks.rank, 2, nodes=2), Work(Store(store), "_work/drafter/x")
    features.SHARD_TOKENS = 12
    (folder / str(mine.node)).mkdir()
    path = folder / str(mine.node) / "features.bin"
    found = features.cached(Counted(work, mine.rank), CHATS, path, work, lambda _done, _total: None, mine)
    values = [found(index) for index in range(len(CHATS))]
    expected = [Counted(work, 9)(chat.token_ids).bfloat16() for chat in CHATS]
    assert all(torch.equal(*pair) for pair in zip(values, expected, strict=True))
    return values


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:40] + b"x" + data[41:], lambda _: b""])
def test_a_damaged_part_is_computed_anew(tmp_path, damage):
    work = Work(Store(str(tmp_path / "store")), "_work/drafter/x")

    def progress(_done, _total):
        pass

    features.cached(Counted(work, 0), CHATS, tmp_path / "one", work, progress)
    (part,) = work.names("features/")
    whole = work.get(part)
    work.put(part, damage(whole))
    found = features.cached(Counted(work, 1), CHATS, tmp_path / "two", work, progress)
    assert work.get(part) == whole
    assert torch.equal(found(3), Counted(work, 2)(CHATS[3].token_ids).bfloat16())
    again = features.cached(Counted(work, 3), CHATS, tmp_path / "three", work, progress)
    assert torch.equal(again(3), found(3))
    assert not work.names("computed/3")


@pytest.mark.slow
def test_each_machine_computes_its_share_and_has_all(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "SHARD_TOKENS", features.SHARD_TOKENS)
    store = str(tmp_path / "store")
    work = partial(look_up, store, tmp_path)
    with started(2, tmp_path, work) as ranks:
        work(ranks)
    names = Work(Store(store), "_work/drafter/x").names()
    computed = [name for name in names if name.startswith("computed/") and not name.startswith("computed/9")]
    assert len(computed) == len(CHATS)
    assert {name[len("computed/")] for name in computed} == {"0", "1"}
