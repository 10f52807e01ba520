"""What packing holds of its inputs does not grow with their layers."""

import re
from pathlib import Path

import pytest

from components.contract.log import Log
from components.pack.target import write_target
from tests.components.pack.conftest import build_model, quantize, train

LAYERS = {"num_hidden_layers": 24, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}


def resident(folder: Path) -> int:
    """Return the bytes of a folder's files that this process has mapped and touched."""
    total = counted = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            counted = f"{folder}/" in line
        elif line.startswith("Rss:") and counted:
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.parametrize("touch", [False, True])
def test_no_tensor_is_mapped(touch: bool, tiny_model: Path, tmp_path: Path):
    """A page touched at each of them would stay, with those around it: 20 MB here, if one were read that way."""
    model = build_model("qwen3", tiny_model, tmp_path, **LAYERS)
    student = quantize(model, tmp_path / "student", 128)
    latents = train(student, tmp_path / "latents", 0.3)
    packed = write_target(student, latents, model, tmp_path / "out", Log("pack"))
    if touch:
        for module in packed.trained:
            packed.latent(module, packed.original(module))
    mapped = resident(student) + resident(latents)
    assert (mapped > 4 << 20) if touch else (mapped < 1 << 18)
