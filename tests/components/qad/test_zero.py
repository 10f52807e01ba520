"""QAD's step on two processes against DeepSpeed's ZeRO-2 on the same two, over gloo."""

from functools import partial

import pytest
import torch

from components.qad.stage import Config
from components.qad.train import Distillation, Run
from components.training.parallel import started
from tests.benchmarks.zero import Zero

SETTINGS = {
    "steps": 6,
    "batch": 8,
    "micro_batch": 2,
    "learning_rate": 4.5e-3,
    "optimizer": "adamw",
    "dtype": "float32",
    "max_grad_norm": 1.2,
}


def steps_of(folders, scratch, ranks):
    """Take the same steps from the same start; return each way's losses and gradient norms, and its movement."""
    found = {}
    for name, kind, changed in (
        ("ours", Distillation, {}),
        ("zero", Zero, {}),
        ("unclipped", Distillation, {"max_grad_norm": 1e9}),
    ):
        run = Run(Config(**SETTINGS | changed), *folders, scratch, ranks)
        start = [master.detach().clone() for master in run.student.masters()]
        parts = (run.config, run.student, run.teacher, run.teacher_head, run.split, run.shares, run.optimizer, ranks)
        distillation = kind(*parts)
        lines = [distillation.step(step) for step in range(run.config.steps)]
        masters = zip(run.student.masters(), start, strict=True)
        moved = torch.cat([(master.detach() - before).flatten() for master, before in masters])
        found[name] = torch.tensor([[line["loss"], line["grad_norm"]] for line in lines]), moved
    return found


@pytest.mark.slow
def test_two_processes_take_the_steps_of_deepspeed(tiny_model, tiny_student, tiny_sequences, tmp_path):
    """The noise is that of the order of fp32 sums, which Adam passes on where a gradient is nearly zero.

    Some steps are clipped and some are not: Adam alone would forgive a gradient that is always off by one factor.
    """
    work = partial(steps_of, (tiny_model, tiny_student, tiny_sequences), tmp_path)
    with started(2, tmp_path, work) as ranks:
        found = work(ranks)
    (lines, moved), (expected, wanted) = found["ours"], found["zero"]
    norms = expected[:, 1]
    assert norms.min() < SETTINGS["max_grad_norm"] < norms.max()
    torch.testing.assert_close(lines, expected, rtol=1e-5, atol=0)
    noise = (moved - wanted).norm() / wanted.norm()
    assert noise < 1e-5
    assert (found["unclipped"][1] - wanted).norm() / wanted.norm() > 1e-3
