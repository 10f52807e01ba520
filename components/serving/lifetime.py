"""A vLLM plugin: engine processes end with the process that started them.

vLLM's own clean-up runs in the parent, so a parent killed with -9 leaves engine and worker behind, each holding the
model. Only processes that find ``QDFLASH_END_WITH_PARENT`` set are affected: regen sets it. vLLM finds this by its
entry point (``vllm.general_plugins``).
"""

import ctypes
import multiprocessing
import os
import signal

VARIABLE = "QDFLASH_END_WITH_PARENT"
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Ask the kernel to end this process with its parent; called by vLLM in each of its processes."""
    if os.environ.get(VARIABLE) == "1" and multiprocessing.parent_process() is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
