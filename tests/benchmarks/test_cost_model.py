import dataclasses
import shutil

import cost_model
import cost_shapes
import pytest
import study
import torch
from transformers import AutoConfig

from components.checkpoint.census import skeleton
from components.checkpoint.step_bytes import model_of, step_bytes
from components.drafter import model as drafter_model
from components.measure import cost


@pytest.fixture(scope="module")
def found():
    return cost_shapes.models()


def test_the_shapes_are_those_of_transformers(tmp_path):
    shutil.copy(cost_shapes.CONFIG, tmp_path / "config.json")
    text = {name: tuple(one.shape) for name, one in skeleton(tmp_path).named_parameters() if "visual" not in name}
    text.pop("lm_head.weight", None)
    table = cost_shapes.dense_table(cost_shapes.read_config())
    assert {name: shape for name, (_, shape) in table.items()} == text


def test_the_drafter_is_that_of_its_builder():
    with torch.device("meta"):
        drafter = drafter_model.build(
            AutoConfig.from_pretrained(cost_shapes.CONFIG),
            layers=5,
            taps=[1, 8, 15, 22, 29],
            block_size=16,
            mask_token=248070,
            heads=32,
            key_value_heads=8,
            head_dim=128,
            intermediate_size=9728,
        )
    built = {name: tuple(one.shape) for name, one in drafter_model.trained_parameters(drafter).items()}
    assert {name: shape for name, (_, shape) in cost_shapes.drafter_table(2560).items()} == built


def test_bytes_agree_with_headers_that_others_read(found):
    """The published checkpoints: 3.29 GB a step of which 1.27 the head, 0.28 GB the drafter, 4.84 GB in all."""
    parts = step_bytes(found["W4"], 0, found["W4 drafter"])
    assert (parts["target linears"] + parts["target head"]) / 1e9 == pytest.approx(3.29, abs=0.005)
    assert parts["drafter linears"] / 1e9 == pytest.approx(0.28, abs=0.005)
    assert (sum(parts.values()) - parts["target state"]) / 1e9 == pytest.approx(4.84, abs=0.01)
    assert found["BF16 drafter"].parameters == 537_395_200
    assert found["BF16"].state == 24 * 32 * 128 * 128 * 4
    assert found["BF16"].key_value == 8 * 2 * 4 * 256 * 2


def test_fitted_rows_are_met_and_the_page_is_what_the_code_says(found, monkeypatch, tmp_path):
    constants = cost_model.calibrate(found)
    rows = {row["variant"]: row for row in cost_model.table(found, constants) if row["metric"] == "relative_error"}
    assert len(rows) == len(cost_model.FIGURES)
    for name in (*cost_model.FITTED, *cost_model.FITTED_HOST):
        assert abs(rows[name]["value"]) < 0.005
    for name, row in rows.items():
        if "drafter" not in name:
            assert abs(row["value"]) < cost.ERROR_ALONE
        elif name.startswith("h200") and "BF16 drafter" not in name:
            assert abs(row["value"]) < cost.ERROR_DRAFTED
        else:
            assert round(abs(row["value"]), 2) <= cost.ERROR_UNKNOWN
    assert dataclasses.astuple(cost.FITTED) == pytest.approx(dataclasses.astuple(constants), rel=0.001)
    committed = (study.RESULTS / "cost-model.md").read_text().splitlines()[4:]
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    cost_model.main()
    assert (tmp_path / "cost-model.md").read_text().splitlines()[4:] == committed


def test_packing_leaves_the_gates_and_the_embedding(found):
    table = cost_shapes.packed(cost_shapes.dense_table(cost_shapes.read_config()), 32)
    layer = "model.language_model.layers.0.linear_attn"
    assert f"{layer}.in_proj_a.weight" in table
    assert table[f"{layer}.in_proj_qkv.weight_packed"] == ("I32", (8192, 320))
    assert table[f"{layer}.in_proj_qkv.weight_scale"] == ("BF16", (8192, 80))
    assert sum(name.endswith("weight_packed") for name in table) == 200
    assert model_of(table, cost_shapes.read_config()).parameters == found["BF16"].parameters
