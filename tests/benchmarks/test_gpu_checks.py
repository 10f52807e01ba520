import pytest
import torch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of a GPU are checked on a GPU")
def test_kernels_of_a_gpu():
    import gpu_checks

    gpu_checks.check()
