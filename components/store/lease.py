"""A lease on one digest's work in progress, so that two processes do not share it.

The lease is one object, made by conditional put and renewed by a heartbeat thread. It is taken over when its holder is
known to be dead (same host, no such process) or when its beat has not moved for ``TTL_SECONDS`` of our own clock.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from components.contract.errors import TransientError
from components.store.backend import Store
from components.store.process import start_time

TTL_SECONDS = 60.0
BEAT_SECONDS = 10.0
POLL_SECONDS = 1.0


class Lease:
    """Held between :meth:`acquire` and :meth:`release`; :attr:`lost` is set when another process took it."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._owner = uuid.uuid4().hex
        self._beat = 0
        self._data = b""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost = threading.Event()

    def acquire(self, finished: Callable[[], bool], waiting: Callable[[dict[str, Any]], None]) -> bool:
        """Block until the lease is ours (True) or ``finished()`` says the work is done elsewhere (False).

        ``waiting(holder)`` is called once when another live process holds the lease.
        """
        seen, since, told = b"", time.monotonic(), False
        while not finished():
            mine = self._document()
            if self._store.create(self._key, mine):
                return self._hold(mine)
            held = self._store.read(self._key)
            if held is None:
                continue
            if held != seen:
                seen, since = held, time.monotonic()
            if is_dead(held) or time.monotonic() - since > TTL_SECONDS:
                if self._store.replace(self._key, held, mine):
                    return self._hold(mine)
                continue
            if not told:
                waiting(json.loads(held))
                told = True
            time.sleep(POLL_SECONDS)
        return False

    def release(self) -> None:
        """Stop the heartbeat and give the lease back."""
        self._stop.set()
        if self._thread:
            self._thread.join()
        with contextlib.suppress(TransientError):  # an unreachable store must not hide why the work ended
            if not self.lost.is_set() and self._store.read(self._key) == self._data:
                self._store.delete(self._key)

    def is_taken(self) -> bool:
        """Say whether another process holds the lease now, asking the store: a beat may be seconds away."""
        with contextlib.suppress(Exception):
            held = self._store.read(self._key)
            return held is None or json.loads(held)["owner"] != self._owner
        return self.lost.is_set()

    def check(self) -> None:
        """Raise :class:`TransientError` when the lease was lost."""
        if self.lost.is_set():
            raise TransientError(f"{self._store.uri(self._key)}: another process took over this work; run again")

    def _hold(self, data: bytes) -> bool:
        self._data = data
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()
        return True

    def _renew(self) -> None:
        renewed = time.monotonic()
        while not self._stop.wait(BEAT_SECONDS):
            self._beat += 1
            data = self._document()
            try:
                held = self._store.read(self._key)
                # After a lost answer the store may hold a beat that we believe failed: the owner decides.
                if held is None or json.loads(held)["owner"] != self._owner:
                    self.lost.set()
                    return
                if not self._store.replace(self._key, held, data):
                    self.lost.set()
                    return
            except Exception:
                if time.monotonic() - renewed > TTL_SECONDS:
                    self.lost.set()
                    return
                continue
            self._data, renewed = data, time.monotonic()

    def _document(self) -> bytes:
        pid = os.getpid()
        document = {
            "owner": self._owner,
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": pid,
            "started": start_time(pid),
            "beat": self._beat,
        }
        return json.dumps(document).encode()


def is_dead(data: bytes) -> bool:
    """Say whether a lease's holder is a process of this machine that is gone."""
    try:
        holder = json.loads(data)
        if holder["machine"] != _machine():
            return False
        return start_time(holder["pid"]) != holder["started"]
    except (ValueError, KeyError, TypeError):
        return True  # no holder can be read from it: leases are put whole, so nobody's write is under way


def forget(store: Store, key: str, host: str) -> None:
    """Take a lease from a host that is gone, such as a container: others could tell only after ``TTL_SECONDS``."""
    held = store.read(key)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if held is not None and json.loads(held)["host"] == host:
            store.delete(key)


def _machine() -> str:
    """This boot of this kernel and this pid namespace: only there does a pid mean the same process."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
