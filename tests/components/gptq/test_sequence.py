"""The order of calibration, and what a run costs and survives."""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save

from components.checkpoint.grid import read_grid
from components.contract.digest import stage_digest
from components.drafter.data import Chat
from components.drafter.features import TargetFeatures
from components.gptq import stage
from components.gptq.calibrate import Calibration
from components.gptq.quantize import round_to_grid
from components.gptq.sequence import How, parts, quantize_in_sequence
from components.store.artifact import commit, read_manifest
from components.store.backend import Store
from components.store.work import Work
from tests.components.gptq.conftest import save_drafter
from tests.components.gptq.test_stage import CONFIG, quantize

TOKENS = torch.tensor([1, 40, 50, 60, 70, 80, 90, 100, 110, 120, 2])
CHATS = [Chat("a", TOKENS, 4), Chat("b", TOKENS[:8], 3)]
MIB = 2**20


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_part_is_calibrated_on_what_the_quantised_parts_before_it_give(drafter, target, tmp_path):
    compute, before = TargetFeatures(target, [0, 2]), copy.deepcopy(drafter)
    calibration = Calibration(CHATS, lambda index: compute(CHATS[index].token_ids), 4, torch.float32)
    work = Work(Store(str(tmp_path)), "_work")
    result = quantize_in_sequence(drafter, calibration, How("gptq", 32), work, lambda *_: None)
    originals = parts(before)[-1]
    with torch.no_grad():
        for name, linear in parts(drafter)[-1].items():
            linear.weight.copy_(originals[name].weight)  # as it was when its own part was calibrated
    behind, alone = calibration.hessians(drafter, parts(drafter)[-1]), calibration.hessians(before, originals)
    for name, linear in originals.items():
        weight, found = linear.weight.detach(), result.errors[name].rounding
        assert found == pytest.approx(round_to_grid(weight, behind[name], 32)[1], rel=1e-4)
        assert found != pytest.approx(round_to_grid(weight, alone[name], 32)[1], rel=1e-4)


def test_memory_does_not_grow_with_the_number_of_conversations(drafter):
    """Features of a conversation take 4 MiB here, those of the last 31 together 124, and its activations more."""
    chats, held = [Chat(str(at), torch.randint(4, 320, (16384,)), 16376) for at in range(40)], []

    def features(index: int) -> torch.Tensor:
        held.append(resident())
        return torch.full((16384, 128), index / 40, dtype=torch.bfloat16)

    Calibration(chats, features, 2, torch.float32).hessians(drafter, parts(drafter)[1])
    assert len(held) == 40
    assert max(held[8:]) - held[8] < 32 * MIB


def test_the_order_of_columns_changes_codes_but_neither_scales_nor_layout(drafter_folder, tiny_model, chats, tmp_path):
    found = {}
    for actorder in ("static", "none"):
        (tmp_path / actorder).mkdir()
        path, metrics = quantize(drafter_folder, tiny_model, chats, tmp_path / actorder, actorder=actorder)
        assert metrics["relative_error"]["mean"] < metrics["relative_error"]["rounding_mean"]
        found[actorder] = load_file(path / "model.safetensors")
    static, none = found.values()
    assert static.keys() == none.keys()
    assert not any(name.endswith("g_idx") for name in static)
    different = {name for name in static if not torch.equal(static[name], none[name])}
    assert different
    assert all(name.endswith("weight_packed") for name in different)


def test_the_default_drafter_has_36_quantised_linears(target, tiny_model, chats, tmp_path):
    source = save_drafter(target, tmp_path / "drafter", layers=5)
    path, metrics = quantize(source, tiny_model, chats, tmp_path, method="rtn")
    assert metrics["quantized"] == len(read_grid(path)) == 36
    assert len(metrics["relative_error"]["by_linear"]) == 36


@pytest.mark.slow
def test_a_run_killed_between_two_parts_goes_on_after_them(target, tiny_model, chats, tmp_path):
    """Kill -9; what is stored then is marked, to see it used, and the end is that of a run of one piece."""
    source, store = save_drafter(target, tmp_path / "drafter", layers=5), Store(str(tmp_path / "store"))
    bound, digests = [], {}
    for port, folder in (("drafter", source), ("target", tiny_model), ("chats", chats)):
        artifact, _ = commit(store, "model", port.encode().hex().ljust(64, "0"), folder, {"metrics": {}})
        bound += ["--input", f"{port}={artifact.uri}"]
        digests[port] = [artifact.digest]
    digest = stage_digest("gptq", stage.VERSION, stage.Config(**CONFIG), digests)
    argv = ["--config", json.dumps(CONFIG), *bound, "--output", store.uri(f"gptq/{digest}")]
    command = [sys.executable, "-m", "components.gptq", *argv]
    environment = os.environ | {"QDFLASH_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}

    work = Work(store, f"_work/gptq/{digest}")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, env=environment)
        while work.get("part-001") is None:
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert read_manifest(store, "gptq", digest) is None
    assert "part-005" not in work.names()
    tensors = load(work.get("part-000"))
    tensors["fc.errors"] = torch.tensor([0.123, 0.456], dtype=torch.float64)
    work.put("part-000", save(tensors))

    again = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert again.returncode == 0, again.stderr
    artifact = read_manifest(store, "gptq", digest)
    assert artifact.metrics["relative_error"]["by_linear"]["fc"] == {"stored": 0.123, "rounding": 0.456}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    whole, _ = quantize(source, tiny_model, chats, tmp_path)
    torch.set_num_threads(threads)
    continued = Path(store.uri(f"gptq/{digest}/{artifact.manifest['attempt']}"))
    for name in ("model.safetensors", "config.json"):
        assert (continued / name).read_bytes() == (whole / name).read_bytes()
