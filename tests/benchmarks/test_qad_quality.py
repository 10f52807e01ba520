import gzip
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import qad_arms
import qad_quality
import torch

from components.checkpoint.load import load_model
from components.qad.hidden import head
from tests.components.conftest import build_tiny_model
from tests.components.qad.conftest import quantize_folder, random_sequences

SETTINGS = {"steps": 3, "batch": 4, "learning_rate": 2e-2, "optimizer": "adamw", "dtype": "float32"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arms")
    places = {name: folder / name for name in ("teacher", "student", "sequences")}
    for place in places.values():
        place.mkdir()
    build_tiny_model(places["teacher"])
    quantize_folder(places["teacher"], places["student"])
    random_sequences(places["sequences"], 320)
    return places


@pytest.fixture(scope="module")
def items(folders, tmp_path_factory):
    file = tmp_path_factory.mktemp("code") / "code.jsonl.gz"
    rows = [{"prompt": f"def f{n}(a):\n", "canonical_solution": f"    return a + {n}\n"} for n in range(3)]
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return qad_arms.code_items(file, folders["teacher"])


def test_likelihoods_are_those_of_the_whole_logits(folders, items):
    model = load_model(folders["teacher"], torch.float32)
    found = qad_arms.log_likelihoods(model, head(model), items)
    for (ids, start), value in zip(items, found, strict=True):
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        assert math.isclose(value, sum(float(log_p[at - 1, ids[at]]) for at in range(start, len(ids))), rel_tol=1e-4)


def test_every_arm_becomes_rows_of_the_study(folders, items):
    arms = ("qad", "qad, scales re-estimated each step", "qad, bf16 masters")
    start, *done = (
        qad_arms.distil(asdict(arm), SETTINGS, folders, items, steps)
        for arm, steps in ((qad_quality.Arm(), 0), *((qad_quality.ARMS[name], SETTINGS["steps"]) for name in arms))
    )
    assert start["codes_changed"] == 0
    assert len({sum(one["kl"]) for one in (start, *done)}) == 4
    lengths = [len(ids) - start for ids, start in items]
    results = {name: [one, one] for name, one in zip(arms, done, strict=True)}
    rows = qad_quality.table("toy", {None: start}, results, start["code"], lengths)
    found = {(row["variant"], row["metric"]): row for row in rows}
    assert found["toy: qad", "kl_ratio_qad_to_ptq"]["value"] == pytest.approx(sum(done[0]["kl"]) / sum(start["kl"]))
    assert found["toy: teacher", "code_log_likelihood"]["value"] == found["toy: ptq", "code_log_likelihood"]["value"]
    assert found["toy: qad", "codes_changed"]["value"] > 0


def test_the_interval_covers_the_ratio_of_the_population():
    draw = np.random.default_rng(0)
    covered = 0
    for _ in range(40):
        tokens = draw.integers(50, 150, 60)
        found = qad_quality.interval(tokens * draw.normal(2.0, 0.5, 60), tokens)
        covered += found["low"] < 2.0 < found["high"]
    assert covered >= 34


def test_prompts_keep_their_side_of_the_split():
    rows = qad_quality.prompts(3)
    assert len({row["id"] for row in rows}) == len(rows)
    sides: dict[str, set[bool]] = {}
    for row in rows:
        side = qad_quality.is_held_out(row["id"], qad_quality.HELD_OUT)
        sides.setdefault(row["conversations"][0]["content"], set()).add(side)
    assert all(len(side) == 1 for side in sides.values())
