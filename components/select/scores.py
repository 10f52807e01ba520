"""Scores of checkpoints on the whole val split."""

import json
import statistics
from pathlib import Path
from typing import Any

import torch

from components.checkpoint.load import load_model, load_tokenizer
from components.contract.context import Output
from components.qad.evaluate import distance
from components.qad.hidden import TeacherStates, head
from components.qad.student import Student, check_pair
from components.select.quality import Quality
from components.select.stage import Config
from components.sequences.reader import read_index, read_split
from components.training.parallel import Ranks

Score = dict[str, Any]
_MEASURED = {"step", "kl", "top1_agreement", "tokens", "codes_changed"}


def score_all(
    config: Config,
    checkpoints: dict[int, Path],
    teacher: Path,
    student: Path,
    sequences: Path,
    quality: Quality | None,
    output: Output,
) -> list[Score]:
    """Return ``{step, kl, top1_agreement, codes_changed, tokens}`` of the start (step 0) and of each checkpoint.

    With ``quality`` also ``accuracy`` by task, and their mean as ``mean_accuracy``. Scores are kept one by one, so a
    killed run continues after the last.
    """
    check_pair(teacher, student, read_index(sequences)["vocabulary_size"])
    split = read_split(sequences, "val")
    dtype, device = getattr(torch, config.dtype), Ranks().device
    ours = Student.open(student, dtype, device)
    their_model = load_model(teacher, dtype).requires_grad_(False).to(device)
    their_head = head(their_model)
    theirs = TeacherStates(their_model, split, output.scratch / "teacher.bin" if config.cache_teacher else None)
    tokenizer = load_tokenizer(student) if quality else None
    scores: list[Score] = []
    steps = [0, *checkpoints]
    for step in steps:
        part = f"scores/step-{step:08d}.json"
        if (score := _kept(output.work.get(part))) is None:
            if step:
                ours.load(checkpoints[step])
            found = distance(ours, theirs, their_head, split, range(len(split)))
            score = {"step": step, **vars(found), "codes_changed": ours.codes_changed()}
            if quality:
                with ours.frozen():
                    score["accuracy"] = quality.accuracy(ours.model, tokenizer)
                score["mean_accuracy"] = statistics.fmean(score["accuracy"].values())
            output.work.put(part, json.dumps(score).encode())
        scores.append(score)
        output.log.progress(len(scores), len(steps), **scores[-1])
    return scores


def _kept(stored: bytes | None) -> Score | None:
    """Read a score; None when there is none, or what is there is damaged: it is taken again."""
    try:
        score: Score = json.loads(stored or b"")
        return score if score.keys() >= _MEASURED else None
    except (ValueError, AttributeError):
        return None
