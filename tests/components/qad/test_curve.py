import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from components.qad.curve import write_curve


def test_events_hold_the_numbers_of_the_lines(tmp_path):
    curve = [
        {"step": 0, "loss": None, "kl": 0.5},
        {"step": 1, "loss": 0.25, "lr": 1e-6},
        {"step": 2, "loss": 0.125, "lr": 2e-6, "kl": 0.375},
    ]
    write_curve(curve, tmp_path)
    assert [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()] == curve
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for key in ("loss", "lr", "kl"):
        expected = [(line["step"], line[key]) for line in curve if line.get(key) is not None]
        found = [(one.step, one.value) for one in events.Scalars(key)]
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected])
