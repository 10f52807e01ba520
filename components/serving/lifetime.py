"""A vLLM plugin: a server that loses its engine says so by its exit code, and engines end with who started them.

vLLM's server ends with 0 when its engine has died, as if it had been told to: what restarts on failure would not. And
vLLM's own clean-up runs in the parent, so a parent killed with -9 leaves engine and worker behind, each holding the
model; those that find ``QDFLASH_END_WITH_PARENT`` set, as regen and ``qdflash serve`` do, end with it. vLLM finds this
by its entry point (``vllm.general_plugins``).
"""

import ctypes
import multiprocessing
import os
import signal
from functools import partial
from typing import Any

VARIABLE = "QDFLASH_END_WITH_PARENT"
ENGINE_DIED = 1
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Do a server's or an engine's part; called by vLLM in each of its processes."""
    if multiprocessing.parent_process() is None:
        _fail_with_the_engine()
    elif os.environ.get(VARIABLE) == "1":
        end_with_parent(signal.SIGKILL)


def end_with_parent(sent: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, sent)


def _fail_with_the_engine() -> None:
    """Let a server whose engine is dead when it shuts down end with ``ENGINE_DIED``.

    A server that was told to stop shuts a living engine down first; what calls come after it find it dead as meant.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    shutdown = AsyncLLM.shutdown

    def first(engine: Any, timeout: float | None = None) -> None:
        engine.shutdown = partial(shutdown, engine)
        died = getattr(engine, "errored", False)  # an engine that did not start has no such thing
        engine.shutdown(timeout)
        if died:
            raise SystemExit(ENGINE_DIED)

    AsyncLLM.shutdown = first
