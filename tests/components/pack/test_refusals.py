"""What packing refuses of a damaged or foreign student: in words that name the module and the file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.checkpoint.grid import PACKED, SCALE
from components.checkpoint.tensors import INDEX
from components.contract.errors import UserError
from components.contract.log import Log
from components.pack.target import write_target
from tests.components.pack.conftest import GROUPS, build_model, quantize, train

KIND = "qwen3_5"
MODULE = "model.layers.1.mlp.up_proj"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def made(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its student in two shards, the second of which has the module at its end, and latents."""
    root = tmp_path_factory.mktemp("made")
    model = build_model(KIND, tiny_model, root)
    student = quantize(model, root / "student", GROUPS[KIND])
    train(student, root / "latents", 0.3)
    tensors = load_file(student / "model.safetensors")
    second = {name: tensors.pop(name) for name in list(tensors) if name.startswith(MODULE)}
    save_file(tensors, student / ONE)
    save_file(second, student / TWO)
    (student / "model.safetensors").unlink()
    index = dict.fromkeys(tensors, ONE) | dict.fromkeys(second, TWO)
    (student / INDEX).write_text(json.dumps({"weight_map": index}))
    return root


def tensors_are(**kinds: torch.Tensor) -> Callable[[Path], None]:
    """Put other tensors of the module in place of its own, or beside them."""

    def change(student: Path) -> None:
        tensors = load_file(student / TWO) | {f"{MODULE}.{kind}": value for kind, value in kinds.items()}
        save_file(tensors, student / TWO)
        index = json.loads((student / INDEX).read_text())["weight_map"]
        (student / INDEX).write_text(json.dumps({"weight_map": index | dict.fromkeys(tensors, TWO)}))

    return change


def a_scale_is(value: float) -> Callable[[Path], None]:
    scales = torch.full((128, 2), 0.1).bfloat16()
    scales[3, 1] = value
    return tensors_are(weight_scale=scales)


def weights_are(**fields: object) -> Callable[[Path], None]:
    """Declare other weights in the config."""

    def change(student: Path) -> None:
        config = json.loads((student / "config.json").read_text())
        config["quantization_config"]["config_groups"]["group_0"]["weights"] |= fields
        (student / "config.json").write_text(json.dumps(config))

    return change


def cut(student: Path) -> None:
    data = (student / TWO).read_bytes()
    (student / TWO).write_bytes(data[:-1])


def ghost(student: Path) -> None:
    index = json.loads((student / INDEX).read_text())["weight_map"]
    (student / INDEX).write_text(json.dumps({"weight_map": index | {f"{MODULE}.bias": TWO}}))


def twice(student: Path) -> None:
    save_file(load_file(student / ONE) | {f"{MODULE}.{SCALE}": torch.ones(128, 2).bfloat16()}, student / ONE)


def split(student: Path) -> None:
    """Its partner in the served matrix becomes dense."""
    tensors = load_file(student / TWO)
    for kind in (PACKED, SCALE, "weight_shape"):
        del tensors[f"{MODULE}.{kind}"]
    save_file(tensors | {f"{MODULE}.weight": torch.ones(128, 64).bfloat16()}, student / TWO)
    index = json.loads((student / INDEX).read_text())["weight_map"]
    index = {name: shard for name, shard in index.items() if not name.startswith(MODULE)}
    (student / INDEX).write_text(json.dumps({"weight_map": index | {f"{MODULE}.weight": TWO}}))


@pytest.mark.parametrize(
    ("change", "file", "says"),
    [
        (tensors_are(weight_zero_point=torch.zeros(16, 2, dtype=torch.int32)), TWO, "has zero points"),
        (tensors_are(weight_g_idx=torch.arange(64)), TWO, "has g_idx"),
        (tensors_are(weight_scale=torch.ones(128, 2).to(torch.float8_e4m3fn)), TWO, "weight_scale is float8_e4m3fn"),
        (tensors_are(weight_scale=torch.ones(128, 3).bfloat16()), TWO, "3 groups do not divide 64 inputs"),
        (tensors_are(weight_packed=torch.zeros(128, 8, dtype=torch.int64)), TWO, "weight_packed is int64"),
        (a_scale_is(float("nan")), TWO, "zero, negative, infinite or NaN scales"),
        (a_scale_is(0.0), TWO, "zero, negative, infinite or NaN scales"),
        (lambda student: (student / TWO).unlink(), TWO, "it is missing"),
        (cut, TWO, "truncated"),
        (ghost, INDEX, f"{MODULE}.bias is in {TWO}, which does not hold it"),
        (twice, "", f"both {ONE} and {TWO} hold"),
        (split, "", "mlp.gate_proj is quantised but"),
    ],
)
def test_module_and_file_are_named(change: Callable[[Path], None], file: str, says: str, made: Path, tmp_path: Path):
    student = shutil.copytree(made / "student", tmp_path / "student")
    change(student)
    with pytest.raises(UserError) as caught:
        write_target(student, made / "latents", made / KIND, tmp_path / "out", Log("pack"))
    message = str(caught.value)
    assert MODULE in message
    assert says in message
    assert str(student / file) in message
    assert not list(tmp_path.glob("out/model*"))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"symmetric": False}, "asymmetric (zero points)"),
        ({"actorder": "group"}, "actorder group reorders columns at run time (g_idx)"),
        ({"num_bits": 8, "type": "float"}, "8-bit float weights"),
    ],
)
def test_a_declared_scheme_names_its_group_its_modules_and_the_file(
    fields: dict, says: str, made: Path, tmp_path: Path
):
    student = shutil.copytree(made / "student", tmp_path / "student")
    weights_are(**fields)(student)
    with pytest.raises(UserError) as caught:
        write_target(student, made / "latents", made / KIND, tmp_path / "out", Log("pack"))
    assert f"{student / 'config.json'}: config group group_0 of Linear: {says}" in str(caught.value)


def test_two_group_sizes_name_a_module_of_each(made: Path, tmp_path: Path):
    student = shutil.copytree(made / "student", tmp_path / "student")
    tensors_are(weight_scale=torch.full((128, 1), 0.1).bfloat16())(student)
    config = json.loads((student / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    weights = groups["group_0"]["weights"] | {"group_size": 64}
    groups["group_1"] = groups["group_0"] | {"targets": [MODULE], "weights": weights}
    (student / "config.json").write_text(json.dumps(config))
    latents, out = train(student, tmp_path / "latents", 0.3), tmp_path / "out"
    with pytest.raises(
        UserError, match=rf"{out}: .* in groups of 32 and {MODULE} has 4 bits in groups of 64; all but"
    ):
        write_target(student, latents, made / KIND, out, Log("pack"))
    assert not list(out.glob("model*"))


def test_the_undamaged_student_is_packed(made: Path, tmp_path: Path):
    write_target(made / "student", made / "latents", made / KIND, tmp_path / "out", Log("pack"))
    assert (tmp_path / "out/model.safetensors").is_file()
