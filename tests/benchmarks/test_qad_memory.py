import math

import pytest
import qad_memory


@pytest.mark.slow
def test_every_line_runs_at_a_toy_size(capsys):
    rows = {(row["variant"], row["metric"]): row for row in qad_memory.main(["--toy"])}
    common = rows["chunked", "peak_memory_gb at the common longest"]
    assert common["note"].startswith(f"{qad_memory.TOY.longest} tokens a sequence")
    assert rows["chunked", "tokens_per_second_ratio at the common longest"]["n"] == qad_memory.TOY.rounds
    losses = [rows[variant, "loss"]["value"] for variant in qad_memory.VARIANTS]
    assert all(loss > 0 for loss in losses)
    for loss in losses[1:]:
        assert math.isclose(loss, losses[0], rel_tol=1e-3)
    assert rows["chunked", "longest_sequence"]["value"] == qad_memory.TOY.longest
    assert "tokens_per_second_ratio" in capsys.readouterr().out
