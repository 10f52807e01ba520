"""Answers rows and commits them, counting what a person watching wants to know."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from components.chats.rows import Row
from components.contract.errors import StageError, TransientError
from components.contract.log import Log
from components.regen.engine import Fault
from components.regen.replicas import Replicas
from components.regen.shards import Writer


@dataclass
class Progress:
    """Counts of one run. ``before`` of ``total`` rows were done by earlier runs; at most ``allowed`` may fail."""

    before: int
    total: int
    allowed: float
    answered: int = 0
    tokens: int = 0
    truncated: int = 0
    faults: list[Fault] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def count(self, outcome: Row | Fault) -> None:
        """Count one row's end.

        Raises:
            StageError: too many rows failed, and would again.
            TransientError: too many rows failed because engines did.
        """
        if isinstance(outcome, Fault):
            self.faults.append(outcome)
            self._check()
        else:
            self.answered += 1
            self.tokens += len(outcome["token_ids"])
            self.truncated += outcome["finish_reason"] == "length"

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second since the start."""
        return round(self.tokens / (time.monotonic() - self.started), 2)

    def report(self, log: Log, committed: int) -> None:
        """Write a progress line, with an estimate of the seconds left; only ``committed`` rows survive a kill."""
        log.progress(
            self.before + committed + len(self.faults),
            self.total,
            answered=self.answered,
            tokens_per_second=self.tokens_per_second,
            truncated_share=round(self.truncated / max(1, self.answered), 4),
            failed=len(self.faults),
        )

    def _check(self) -> None:
        if len(self.faults) <= self.allowed:
            return
        lasting = [fault for fault in self.faults if not fault.transient]
        kind, faults = (StageError, lasting) if len(lasting) > self.allowed else (TransientError, self.faults)
        raise kind(
            f"{len(faults)} of {self.total} rows failed, max_failed_share allows {self.allowed:.0f}; "
            f"the first, {faults[0].row_id}: {faults[0].error}"
        )


def generate(replicas: Replicas, rows: Sequence[Row], progress: Progress, writer: Writer, log: Log) -> None:
    """Answer ``rows``; each is with the writer or in ``progress.faults`` when this returns."""
    reported = 0
    for outcome in replicas.answer(rows):
        progress.count(outcome)
        if not isinstance(outcome, Fault):
            writer.add(outcome)
        if writer.committed > reported:  # a log shows a line every few seconds: not one that says nothing new
            reported = writer.committed
            progress.report(log, reported)
