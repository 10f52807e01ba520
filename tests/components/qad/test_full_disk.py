"""A disk that is full: said in one line, whatever the library that wrote made of it."""

import subprocess
import sys

import pytest

from components.contract.context import Output
from components.contract.errors import of_machine
from components.contract.log import Log
from components.qad.stage import Config
from components.qad.train import train
from components.store.backend import Store
from components.store.work import Work

SETTINGS = {"steps": 3, "batch": 4, "optimizer": "adamw", "dtype": "float32"}
CACHED = """
import sys
from pathlib import Path
import torch
from components.checkpoint.load import load_model
from components.contract.errors import UserError
from components.qad.hidden import TeacherStates
from components.sequences.reader import read_split

split = read_split(Path(sys.argv[2]), "train")
states, done = TeacherStates(load_model(Path(sys.argv[1]), torch.float32), split, Path(sys.argv[3])), 0
try:
    for index in range(len(split)):
        states(index)
        done += 1
except UserError as error:
    print(done, error)
"""


def fill(disk, free):
    (disk / "full").write_bytes(bytes((1 << 20) - free))


@pytest.mark.parametrize(
    ("free", "settings"),
    [(400 << 10, {"checkpoint_every": 1}), (900 << 10, {"state_every": 1})],
    ids=["checkpoint", "state"],
)
def test_what_is_kept_finds_no_room(tiny_model, tiny_student, tiny_sequences, small_disk, tmp_path, free, settings):
    (small_disk / "out").mkdir()
    fill(small_disk, free)
    output = Output(small_disk / "out", small_disk, Work(Store(str(tmp_path)), "_work/qad/x"), Log("qad"))
    with pytest.raises(Exception, match=r"No space left|unexpected pos") as caught:
        train(Config(**SETTINGS | settings), tiny_model, tiny_student, tiny_sequences, small_disk, output)
    fault = of_machine(caught.value, small_disk)
    assert fault is not None
    assert "disk full: " in str(fault)
    assert f"under {small_disk}; free space" in str(fault)


@pytest.mark.slow
def test_the_teachers_states_find_no_room(tiny_model, tiny_sequences, small_disk):
    """In a process of its own: without a reservation it would end by a signal."""
    fill(small_disk, 100 << 10)
    command = [sys.executable, "-c", CACHED, tiny_model, tiny_sequences, small_disk / "cache.bin"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    finished, _, said = done.stdout.partition(" ")
    assert int(finished) > 5
    assert said.startswith(f"{small_disk}/cache.bin: disk full, no room for the teacher's states; free space or set")
