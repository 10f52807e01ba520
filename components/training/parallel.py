"""One optimizer step over N processes: one per GPU (NCCL), or several on CPUs (gloo).

Each rank takes its share of a step's sequences. Each master has one owner, which alone keeps its moments: gradients
are summed there, moved there, and the result is sent to the others. So what is saved is named by master and not by
rank, a run continues with any number of processes, and an optimizer whose moments are blocks of 8 bits sees whole
matrices. Rank 0 is the stage's own process. It starts the others, all on one machine; or torchrun has started every
rank, on any number of machines that share nothing but the store.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing import _prctl_pr_set_pdeathsig

from components.contract.errors import (
    BUG,
    TRANSIENT,
    USER,
    StageError,
    TransientError,
    UserError,
    of_machine,
    one_line,
)
from components.store import cache

_ENDED = "a process of the training ended early; run again to continue"
_PATIENCE = 5.0
_LONGEST = timedelta(hours=1)
"""How long a rank may wait for another, which may be storing a state. NCCL's own is 10 minutes."""
_BEGUN, _POLL = "begun", 0.2


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that train together; each of the ``nodes`` machines has as many."""

    rank: int = 0
    world: int = 1
    nodes: int = 1

    @property
    def per_node(self) -> int:
        """Processes on each machine."""
        return self.world // self.nodes

    @property
    def node(self) -> int:
        """The number of this machine; ranks count up machine by machine."""
        return self.rank // self.per_node

    @property
    def local(self) -> int:
        """This process's number on its machine."""
        return self.rank % self.per_node

    @property
    def device(self) -> torch.device:
        """A GPU of its own, or the CPU where there is none."""
        return torch.device("cuda", self.local) if torch.cuda.is_available() else torch.device("cpu")

    def sum(self, *values: float) -> list[float]:
        """Return each value's sum over all ranks, in fp64."""
        if self.world == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(sums)
        found: list[float] = sums.tolist()
        return found

    def backend(self) -> str:
        """Take this process's GPU, if there is one; return what its kind talks over."""
        if self.device.type == "cpu":
            return "gloo"
        torch.cuda.set_device(self.device)
        return "nccl"

    def meet(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            distributed.barrier()

    def shared(self, folder: Path) -> Path:
        """Return the folder that the first rank of this machine gives; each gives one."""
        if self.per_node == 1:
            return folder
        folders = [folder] * self.world
        distributed.all_gather_object(folders, folder)
        return folders[self.rank - self.local]


def balanced(sizes: Sequence[int], world: int) -> list[int]:
    """Return each piece of work's rank: the largest first, each to whoever has least."""
    loads, owners = [0] * world, [0] * len(sizes)
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        owners[piece] = loads.index(min(loads))
        loads[owners[piece]] += sizes[piece]
    return owners


class Shares:
    """Which rank owns which of the named masters: the largest first, each to whoever has least."""

    def __init__(self, masters: dict[str, torch.nn.Parameter], ranks: Ranks) -> None:
        self.masters, self._ranks = masters, ranks
        names = sorted(masters)
        sizes = [masters[name].numel() for name in names]
        self._owner = dict(zip(names, balanced(sizes, ranks.world), strict=True))

    @property
    def owned(self) -> dict[str, torch.nn.Parameter]:
        """The masters that this rank moves, in the order given."""
        return {name: master for name, master in self.masters.items() if self._owner[name] == self._ranks.rank}

    def sum_gradients(self) -> None:
        """Sum each gradient over all ranks at its owner; the others drop theirs."""
        if self._ranks.world == 1:
            return
        for name, master in self.masters.items():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            distributed.reduce(master.grad, self._owner[name])
            if self._owner[name] != self._ranks.rank:
                master.grad = None

    def norm(self) -> float:
        """Return the norm of the whole summed gradient, each owner adding its part."""
        parts = [master.grad for master in self.owned.values() if master.grad is not None]
        mine = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts))).item() if parts else 0.0
        return self._ranks.sum(mine**2)[0] ** 0.5 if self._ranks.world > 1 else mine

    def scale_gradients(self, factor: float) -> None:
        """Multiply the summed gradients, each at its owner."""
        torch._foreach_mul_([master.grad for master in self.owned.values() if master.grad is not None], factor)

    def spread(self) -> None:
        """Give every rank its owner's values of each master."""
        if self._ranks.world == 1:
            return
        for name, master in self.masters.items():
            distributed.broadcast(master.data, self._owner[name])


@contextmanager
def started(count: int, scratch: Path, work: Callable[[Ranks], object]) -> Iterator[Ranks]:
    """Yield rank 0 of ``count`` ranks; the others call ``work`` in processes of their own.

    A rank that dies takes the others with it: collective calls would wait for it. Under torchrun ``count`` is its own,
    and every rank is yielded in the process that torchrun has started.

    Args:
        count: processes, this one included.
        scratch: a folder that all share.
        work: what the others do; it is pickled.

    Raises:
        TransientError: another rank ended early (UserError: it named what must be changed; StageError: by a bug).
            Where this one cannot notice, the process ends with that exit code.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with _joined_by_torchrun() as ranks:
            yield ranks
        return
    if count == 1:
        yield Ranks()
        return
    meeting = f"file://{scratch.resolve()}/meeting"
    spawn = get_context("spawn")
    mine, *theirs = (Ranks(rank, count) for rank in range(count))
    others: list[BaseProcess] = []
    over = threading.Event()
    try:
        for one in theirs:
            process = spawn.Process(target=_other, args=(one, meeting, work), daemon=True)
            process.start()
            others.append(process)
        threading.Thread(target=_watch, args=(others, over), daemon=True).start()
        _join(mine, init_method=meeting)
        yield mine
        mine.meet()
    except RuntimeError as error:  # perhaps of a collective call that lost its other end
        if of_machine(error):
            raise
        over.set()  # one thread reads exit codes: the kernel tells each only once
        gone = connection.wait([other.sentinel for other in others], _PATIENCE)
        for other in others:
            if other.sentinel in gone:
                other.join()  # a process's files are closed a moment before its exit code is there
        if any(other.exitcode for other in others):
            raise _fault(others) from error
        raise
    finally:
        over.set()
        for other in others:
            other.kill()
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _join(ranks: Ranks, **meeting: Any) -> None:
    place = {"rank": ranks.rank, "world_size": ranks.world}
    distributed.init_process_group(ranks.backend(), timeout=_LONGEST, **place, **meeting)


@contextmanager
def _joined_by_torchrun() -> Iterator[Ranks]:
    """Yield this process's rank once rank 0 is here, which may wait long for another process's lease."""
    ranks = Ranks(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE")))
    try:
        store, _, _ = next(distributed.rendezvous("env://"))
        if ranks.rank == 0:
            store.set(_BEGUN, "")
        while not store.check([_BEGUN]):
            time.sleep(_POLL)
        _join(ranks, store=store)
        yield ranks
        ranks.meet()
    except RuntimeError as error:
        if _lost(error):
            raise TransientError(_ENDED) from error
        raise
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _other(ranks: Ranks, meeting: str, work: Callable[[Ranks], object]) -> None:
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    if (parent := parent_process()) is None or os.getppid() != parent.pid:
        return  # rank 0 was gone before that was set
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts all: rank 0 ends the others
    try:
        _join(ranks, init_method=meeting)
        work(ranks)
        ranks.meet()
    except Exception as error:
        if _lost(error):
            sys.exit(TRANSIENT)
        fault = error if isinstance(error, StageError) else of_machine(error, cache.home())
        if fault is None:
            raise
        _say(f"process {ranks.rank}: {one_line(fault)}")
        sys.exit(fault.exit_code)
    distributed.destroy_process_group()


def _lost(error: Exception) -> bool:
    """Say whether a collective call, or the store where the ranks meet, has lost its other end."""
    return isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _watch(others: list[BaseProcess], over: threading.Event) -> None:
    connection.wait([other.sentinel for other in others])
    if not over.wait(2 * _PATIENCE) and any(other.exitcode for other in others):
        _say(str(fault := _fault(others)))
        os._exit(fault.exit_code)


def _fault(others: Sequence[BaseProcess]) -> StageError:
    """Say why the others ended: by what must be changed or a bug, which one of them has said, or else by chance."""
    codes = {other.exitcode for other in others if other.exitcode}
    if USER in codes:
        return UserError("a process of the training named what must be changed; then run again to continue")
    if codes == {BUG}:
        return StageError("a process of the training failed; its error is above")
    return TransientError(_ENDED)


def _say(fault: str) -> None:
    print(f"training failed: {fault}", file=sys.stderr, flush=True)
