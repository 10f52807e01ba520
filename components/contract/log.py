"""One structured line per event, and progress for people and for the engine.

Lines go to stderr as ``HH:MM:SS stage event key=value …``; a progress line has the event ``progress`` with ``done``
and ``total``, and is written at most every few seconds.
"""

import json
import sys
import time
from typing import Any

PROGRESS_INTERVAL_SECONDS = 5.0


class Log:
    """Writes a stage's log lines.

    ``progress(done, total)`` is throttled; the first and the last call of a series are always written.
    """

    def __init__(self, stage: str, stream: Any = None) -> None:
        self.stage = stage
        self._stream = stream or sys.stderr
        self._last_progress = 0.0
        self._started: float | None = None
        self._first_done = 0

    def event(self, name: str, /, **fields: Any) -> None:
        """Write one line; values are JSON when they hold more than one printable word."""
        words = [f"{key}={_value(value)}" for key, value in fields.items()]
        print(time.strftime("%H:%M:%S"), self.stage, name, *words, file=self._stream, flush=True)

    def progress(self, done: int, total: int, **fields: Any) -> None:
        """Report ``done`` of ``total`` units with an estimate of the seconds left."""
        now = time.monotonic()
        if self._started is None or done < self._first_done:
            self._started, self._first_done, self._last_progress = now, done, 0.0
        if done < total and now - self._last_progress < PROGRESS_INTERVAL_SECONDS:
            return
        self._last_progress = now
        advanced = done - self._first_done
        if advanced > 0 and done < total:
            fields["eta_s"] = round((now - self._started) / advanced * (total - done))
        self.event("progress", done=done, total=total, **fields)
        if done >= total:
            self._started = None


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    text = str(value)
    plain = text.isprintable() and text and " " not in text and not text.startswith('"')
    return text if plain else json.dumps(text, ensure_ascii=False)
