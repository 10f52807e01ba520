"""A machine without enough memory is told in one line what to lower."""

import pytest
import torch

from components.contract.errors import of_machine


def test_what_torchs_allocators_raise_is_named_a_lack_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    for error in (
        caught.value,
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
    ):
        fault = of_machine(error)
        assert str(fault).startswith("out of memory: ")
        assert "micro_batch" in str(fault)
    assert of_machine(RuntimeError("shapes do not match")) is None
