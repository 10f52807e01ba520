"""What becomes of a run one of whose processes fails."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from components.contract.errors import StageError, TransientError, UserError
from components.training.parallel import Ranks, started

STORE = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""
STARTED = """
import sys
from pathlib import Path
from components.training.parallel import started
from tests.components.training.test_faults import Slow
with started(2, Path(sys.argv[1]), Slow(Path(sys.argv[1]) / "pid")):
    pass
"""


def refuse(ranks: Ranks) -> None:
    if ranks.rank:
        raise UserError("this machine has no room")
    ranks.meet()


@pytest.mark.slow
def test_what_another_rank_wants_changed_is_said_and_not_tried_again(tmp_path, capfd):
    with pytest.raises(UserError, match="named what must be changed"), started(2, tmp_path, refuse) as ranks:
        refuse(ranks)
    said = capfd.readouterr().err
    assert "training failed: process 1: this machine has no room\n" in said
    assert "Traceback" not in said


def fill(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise OSError(errno.ENOSPC, "No space left on device", "/scratch/rank-1.pt")
    ranks.meet()


def err(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise KeyError("of ours")
    ranks.meet()


def die(ranks: Ranks) -> None:
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.meet()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "fault", "says", "traced"),
    [
        (fill, UserError, "process 1: disk full: .*rank-1.pt", False),
        (err, StageError, "KeyError: 'of ours'", True),
        (die, TransientError, "", False),
    ],
)
def test_how_another_of_three_ranks_ends_decides(tmp_path, capfd, work, fault, says, traced):
    """A bug is not tried again, a full disk is named, and whoever lost the dead one says nothing."""
    with pytest.raises(fault) as caught, started(3, tmp_path, work) as ranks:
        work(ranks)
    assert type(caught.value) is fault
    said = capfd.readouterr().err
    assert re.search(says, said)
    assert ("Traceback" in said) == traced


def exhaust(ranks: Ranks) -> None:
    torch.empty(1 << 55)


@pytest.mark.slow
def test_what_all_ranks_lack_is_said_by_each(tmp_path, capfd):
    with pytest.raises(RuntimeError, match="can't allocate memory"), started(2, tmp_path, exhaust) as ranks:
        exhaust(ranks)
    assert "Traceback" not in capfd.readouterr().err


class Slow:
    """Work that takes long to be read in the process that is to do it."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        self.place.write_text(str(os.getpid()))
        time.sleep(2)

    def __call__(self, ranks: Ranks) -> None:
        ranks.meet()


@pytest.mark.slow
def test_a_rank_whose_first_was_killed_while_it_started_does_not_wait_for_it(tmp_path):
    first = subprocess.Popen([sys.executable, "-c", STARTED, tmp_path])
    while not (pid := (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else ""):
        assert first.poll() is None
        time.sleep(0.05)
    first.kill()
    first.wait()
    command, until = Path(f"/proc/{pid}/cmdline"), time.monotonic() + 30
    while command.exists() and command.read_bytes():  # empty once it is dead and only not waited for
        assert time.monotonic() < until
        time.sleep(0.1)


def test_the_place_where_torchruns_ranks_meet_is_lost(tmp_path, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True) as store:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.stdout.readline().strip()}
        place |= {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        threading.Timer(2, store.kill).start()
        with pytest.raises(TransientError, match="ended early"), started(2, tmp_path, print):
            pass
