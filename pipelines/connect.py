"""Which store a command works on. What the user's environment says always wins."""

import os

from components.store.backend import Store
from pipelines import seaweed

_FOREIGN = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL")


def connect(url: str | None = None) -> Store:
    """Return the store at ``url``, else at ``QDFLASH_STORE``, else on the local server, started when it is down.

    Only for the local server does this set the AWS_* variables of this process, and so of the tasks it starts.
    """
    chosen = url or os.environ.get("QDFLASH_STORE")
    if chosen:
        return Store(chosen)
    for name in _FOREIGN:
        os.environ.pop(name, None)
    os.environ.update(seaweed.up())
    return Store(seaweed.DEFAULT_STORE)
