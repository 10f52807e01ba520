"""Real processes over gloo."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from components.contract.context import Output
from components.contract.errors import UserError
from components.contract.log import Log
from components.qad.stage import Config
from components.qad.train import train
from components.store.backend import Store
from components.store.work import Work
from components.training.parallel import Ranks, started

SETTINGS = {
    "steps": 6,
    "batch": 6,
    "learning_rate": 4.5e-3,
    "optimizer": "adamw",
    "dtype": "float32",
    "evaluate_every": 3,
    "evaluation_sequences": 5,
    "checkpoint_every": 6,
    "state_every": 3,
}


def run(folders, place, store, processes, settings=SETTINGS):
    """Train as the stage does; return the curve, and the latents moved from the start."""
    (place / "out").mkdir(parents=True)
    output = Output(place / "out", place, Work(Store(str(store)), "_work/qad/x"), Log("qad"))
    work = partial(train, Config(**settings), *folders, place)
    with started(processes, place, partial(work, None)) as ranks:
        work(output, ranks)
    return result_in(output.path)


def result_in(folder):
    """Return the curve and the last checkpoint's tensors."""
    lines = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    return lines, load_file(folder / f"checkpoints/step-{lines[-1]['step']}/latents.safetensors")


def assert_close(one, other, start):
    for ours, theirs in zip(one[0], other[0], strict=True):
        assert ours.keys() == theirs.keys()
        for key in {"loss", "grad_norm", "kl"} & ours.keys():
            if ours[key] is not None:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-3), (ours["step"], key)
    names = [name for name in start if name.endswith(".weight")]
    apart = torch.cat([(one[1][name] - other[1][name]).flatten() for name in names])
    moved = torch.cat([(one[1][name] - start[name]).flatten() for name in names])
    assert apart.norm() / moved.norm() < 0.01


@pytest.fixture
def folders(tiny_model, tiny_student, tiny_sequences):
    return tiny_model, tiny_student, tiny_sequences


@pytest.mark.slow
def test_two_processes_equal_one_and_continue_each_others_state(folders, tmp_path):
    """The noise is that of the order in which fp32 gradients are added, which Adam passes on."""
    from components.qad.student import Student

    student = Student.open(folders[1], torch.float32)
    start = {f"{name}.weight": layer.weight.detach() for name, layer in student.layers.items()}
    whole = {count: run(folders, tmp_path / f"whole-{count}", tmp_path / f"store-{count}", count) for count in (1, 2)}
    assert_close(whole[1], whole[2], start)
    later = SETTINGS | {"state_every": 4}
    before = {1: whole[1], 2: whole[2]}
    for first, saved_by, count, step in ((1, 1, 1, 3), (2, 2, 1, 3), (2, 1, 3, 4)):  # the second: 2, then 1, then 3
        stored = Work(Store(str(tmp_path / f"store-{first}")), "_work/qad/x")
        assert stored.get_folder("state", tmp_path / "state")
        assert json.loads((tmp_path / "state/state.json").read_text())["step"] == step
        assert len(list((tmp_path / "state").glob("rank-*.pt"))) == saved_by
        continued = run(folders, tmp_path / f"{first}-{count}", tmp_path / f"store-{first}", count, later)
        assert continued[0][: step + 1] == before[first][0][: step + 1]
        if first == count:
            assert all(torch.equal(continued[1][name], whole[first][1][name]) for name in start)
        else:
            assert_close(continued, whole[first], start)
        before[first] = continued


def test_a_batch_that_does_not_split_is_refused(folders, tmp_path):
    with pytest.raises(UserError, match="6 sequences do not split into micro-batches of 1 on 4 processes"):
        train(Config(**SETTINGS), *folders, tmp_path, ranks=Ranks(0, 4))
