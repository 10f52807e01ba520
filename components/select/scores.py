"""Scores of checkpoints on the whole val split."""

import json
from pathlib import Path
from typing import Any

import torch

from components.checkpoint.load import load_model
from components.contract.context import Output
from components.qad.evaluate import distance
from components.qad.hidden import TeacherStates, head
from components.qad.student import Student, check_pair
from components.sequences.reader import read_index, read_split

Score = dict[str, Any]


def score_all(
    dtype: str,
    checkpoints: dict[int, Path],
    teacher: Path,
    student: Path,
    sequences: Path,
    output: Output,
    cache: bool,
) -> list[Score]:
    """Return ``{step, kl, top1_agreement, codes_changed, tokens}`` of the start (step 0) and of each checkpoint.

    Scores are kept one by one, so a killed run continues after the last.
    """
    check_pair(teacher, student, read_index(sequences)["vocabulary_size"])
    split = read_split(sequences, "val")
    ours = Student.open(student, getattr(torch, dtype))
    their_model = load_model(teacher, getattr(torch, dtype)).requires_grad_(False)
    heads = head(ours.model), head(their_model)
    theirs = TeacherStates(their_model, split, output.scratch / "teacher.bin" if cache else None)
    scores: list[Score] = []
    steps = [0, *checkpoints]
    for step in steps:
        part = f"scores/step-{step:08d}.json"
        if (stored := output.work.get(part)) is None:
            if step:
                ours.load(checkpoints[step])
            found = distance(ours, heads[0], theirs, heads[1], split, range(len(split)))
            score = {"step": step, **vars(found), "codes_changed": ours.codes_changed()}
            stored = json.dumps(score).encode()
            output.work.put(part, stored)
        scores.append(json.loads(stored))
        output.log.progress(len(scores), len(steps), **scores[-1])
    return scores
