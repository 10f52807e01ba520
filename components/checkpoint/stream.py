"""A tensor that is not in memory: what it is, and its bytes a part at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

PART_BYTES = 1 << 20


@dataclass(frozen=True)
class Stream:
    """A tensor to be written without ever being whole in memory.

    ``dtype`` is safetensors' name of it. ``parts()`` yields its bytes, contiguous tensors of any dtype one after the
    other; each keeps its values until the next is asked for.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    parts: Callable[[], Iterator[Tensor]]
