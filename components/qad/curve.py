"""The curve of a run as files: JSON lines, and the same numbers as TensorBoard events."""

import json
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from components.training.state import Line


def write_curve(curve: list[Line], folder: Path) -> None:
    """Write ``curve.jsonl`` and ``tensorboard/``; a line's numbers become scalars at its step."""
    (folder / "curve.jsonl").write_text("".join(json.dumps(line) + "\n" for line in curve))
    with SummaryWriter(str(folder / "tensorboard")) as events:
        for line in curve:
            for key in sorted(line.keys() - {"step"}):
                if line[key] is not None:
                    events.add_scalar(key, line[key], line["step"])
