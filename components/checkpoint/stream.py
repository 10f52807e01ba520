"""A tensor that is not in memory: what it is, and its bytes a part at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

PART_BYTES = 1 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of the types that are read and written."""


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
