import io
import time

import pytest

from components.contract.log import Log
from components.regen.engine import Fault
from components.regen.generate import Progress


def test_a_line_says_rows_rate_shares_and_the_seconds_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 50 rows an earlier run did 10; 8 answers of 5 tokens and a failure take ten seconds."""
    now, lines = [100.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    log, progress = Log("regen", lines), Progress(10, 50, allowed=1, started=100.0)
    log.progress(10, 50)
    for number in range(8):
        reason = "length" if number < 2 else "stop"
        progress.count({"id": str(number), "token_ids": [7] * 5, "finish_reason": reason})
    progress.count(Fault("8", "too long"))
    now[0] = 110.0
    progress.report(log, committed=8)
    said = dict(word.split("=") for word in lines.getvalue().splitlines()[-1].split()[3:])
    assert said == {
        "done": "19",
        "total": "50",
        "answered": "8",
        "tokens_per_second": "4",
        "truncated_share": "0.25",
        "failed": "1",
        "eta_s": str(round(31 * 10 / 9)),
    }
