import pytest
import scale_two_gpus


@pytest.mark.slow
def test_two_processes_are_compared_with_one_at_a_toy_size():
    """One pair of the variants, each a process that starts anew; the others say that they were not measured."""
    found = scale_two_gpus.main(["--toy", "--variants", "qad-1", "qad-2"])
    rows = {(row["variant"], row["metric"]): row for row in found}
    assert rows["qad-2", "tokens_per_second_ratio"]["value"] > 0
    assert rows["qad-2", "loss_difference"]["value"] < 1e-6
    assert rows["qad-2", "grad_norm_difference"]["value"] < 1e-5
    assert 0 < rows["qad-2", "exchange"]["value"] < 10
    assert rows["zero2-2", "tokens_per_second"]["value"] is None
    assert rows["zero2-2", "tokens_per_second"]["note"] == "not asked for"
