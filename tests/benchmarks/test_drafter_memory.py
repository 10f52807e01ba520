import math

import drafter_memory
import pytest


@pytest.mark.slow
def test_every_line_runs_at_a_toy_size(capsys):
    rows = {(row["variant"], row["metric"]): row["value"] for row in drafter_memory.main(["--toy"])}
    losses = [rows[f"micro{count}{kind}", "loss"] for count in (1, 2, 4) for kind in ("", "-materialised")]
    assert losses[0] > 0
    for loss in losses[1:]:
        assert math.isclose(loss, losses[0], rel_tol=1e-4)
    assert rows["micro4", "tokens_per_second_ratio"] > 0
    assert "target_forward" in capsys.readouterr().out
