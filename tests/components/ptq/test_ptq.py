import json
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from components.chats.rows import write_rows
from components.checkpoint.config import read_config
from components.checkpoint.grid import read_grid
from components.checkpoint.load import load_model
from components.checkpoint.quantize import dequantize
from components.checkpoint.tensors import Tensors
from components.contract.context import Input, Inputs, Output
from components.contract.errors import UserError
from components.contract.log import Log
from components.ptq.stage import Config, run
from components.store.backend import Store
from components.store.work import Work
from tests.components.tiny_models import build

LINEARS = {
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "qwen3_5_multimodal": {"in_proj_qkv", "in_proj_z", "out_proj"},
}
LINEARS["qwen3_5_multimodal"] |= LINEARS["llama"]


def quantize(folder: Path, tmp_path: Path, chats: Path | None = None, **config) -> tuple[Path, dict]:
    bound = {"model": [bind(folder)]} | ({"chats": [bind(chats)]} if chats else {})
    (tmp_path / "out").mkdir()
    work = Work(Store(str(tmp_path / "store")), "_work")
    output = Output(tmp_path / "out", tmp_path / "scratch", work, Log("ptq"))
    return output.path, run(Config(**config), Inputs(bound), output)


def bind(folder: Path) -> Input:
    bound = Input(str(folder))
    bound.__dict__["path"] = folder
    return bound


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with structure (each token repeats), so that inputs are correlated and GPTQ has something to use."""
    generator = torch.Generator().manual_seed(0)
    folder = tmp_path_factory.mktemp("chats")
    rows = []
    for number in range(16):
        ids = torch.randint(4, 60, (24,), generator=generator).repeat_interleave(2).tolist()
        rows.append({"id": str(number), "prompt_token_ids": ids[:12], "token_ids": ids[12:]})
    write_rows(folder / "part-0.jsonl", rows)
    return folder


@pytest.fixture(scope="module", params=list(LINEARS))
def model(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build(request.param, tmp_path_factory.mktemp("model") / request.param)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / name, folder)
    return folder


def test_rounding_is_the_librarys_minmax_grid(model: Path, tmp_path: Path):
    folder, metrics = quantize(model, tmp_path)
    grid, original, written = read_grid(folder), Tensors(model), Tensors(folder)
    assert {name.rpartition(".")[2] for name in grid} == LINEARS[model.name]
    assert metrics["quantized"] == len(grid)
    dense = metrics["dense_linears"]
    both_trees = {*dense, *(name.replace("model.language_model.", "model.") for name in dense)}
    assert read_config(folder)["quantization_config"]["ignore"] == sorted(both_trees)
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    for name, quantized in grid.items():
        weight = original[f"{name}.weight"]
        minmax = weight.float().unflatten(1, (-1, 32)).abs().amax(-1) / 7.5
        torch.testing.assert_close(quantized.scales.float(), minmax, rtol=2**-8, atol=0)
        state = {"weight": weight.float(), "weight_scale": quantized.scales.float()}
        packed = PackedQuantizationCompressor.compress(state, scheme)
        assert torch.equal(packed["weight_packed"], written[f"{name}.weight_packed"])
        error = (weight.double() - dequantize(quantized.codes, quantized.scales).double()).square().sum()
        assert metrics["worst_relative_error"] >= float(error / weight.double().square().sum()) - 1e-6
    for name in original:
        if name.removesuffix(".weight") not in grid:
            assert torch.equal(written[name], original[name])
    assert (folder / "chat_template.jinja").read_bytes() == (model / "chat_template.jinja").read_bytes()


@pytest.mark.slow
def test_gptq_beats_rounding_on_the_calibrated_outputs(model: Path, chats: Path, tmp_path: Path):
    (tmp_path / "rtn").mkdir()
    (tmp_path / "gptq").mkdir()
    rounded, _ = quantize(model, tmp_path / "rtn")
    calibrated, metrics = quantize(model, tmp_path / "gptq", chats, method="gptq", calibration_rows=16)
    assert metrics["calibration_rows"] == 16
    assert set(read_grid(calibrated)) == set(read_grid(rounded))
    ids = torch.tensor([row["prompt_token_ids"] + row["token_ids"] for row in map(json.loads, lines(chats))])
    dense, rtn, gptq = (hidden(folder, ids) for folder in (model, rounded, calibrated))
    assert (gptq - dense).square().mean() < 0.9 * (rtn - dense).square().mean()


def lines(folder: Path) -> list[str]:
    return (folder / "part-0.jsonl").read_text().splitlines()


def hidden(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return load_model(folder, torch.float32).model(input_ids=ids).last_hidden_state


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("llama") / "m")


def test_refuses_a_quantised_model(llama: Path, tmp_path: Path):
    (tmp_path / "a").mkdir()
    folder, _ = quantize(llama, tmp_path / "a")
    with pytest.raises(UserError, match="quantised already"):
        quantize(folder, tmp_path)


def test_refuses_groups_that_do_not_divide(llama: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.q_proj has 64 inputs, which groups of 128"):
        quantize(llama, tmp_path, group_size=128)


def test_refuses_to_split_fused_linears_or_to_quantise_nothing(llama: Path, tmp_path: Path):
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match=r"q_proj is quantised but .*k_proj not"):
        quantize(llama, tmp_path / "a", ignore=["re:.*lm_head$", "re:.*k_proj$"])
    with pytest.raises(UserError, match="leaves no linear"):
        quantize(llama, tmp_path, ignore=["re:.*"])


def test_gptq_needs_chats_with_token_ids(llama: Path, tmp_path: Path):
    for name in "abc":
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match="gptq calibrates on chats"):
        quantize(llama, tmp_path / "a", method="gptq")
    rows = tmp_path / "chats"
    rows.mkdir()
    with pytest.raises(UserError, match="holds no chats"):
        quantize(llama, tmp_path / "b", rows, method="gptq")
    write_rows(rows / "part-0.jsonl", [{"id": "7", "conversations": []}])
    with pytest.raises(UserError, match="row 7 has no token ids"):
        quantize(llama, tmp_path / "c", rows, method="gptq")


@pytest.mark.parametrize(
    ("answer", "says"),
    [(None, "no token ids"), ("abc", "no token ids"), ([2**70], "no token ids")]
    + [(ids, "ids outside the model's vocabulary of 320") for ids in ([], [1.5], [320], [-1], [[4]])],
)
def test_gptq_refuses_ids_that_are_not_the_models(llama: Path, tmp_path: Path, answer: object, says: str):
    (tmp_path / "chats").mkdir()
    write_rows(tmp_path / "chats/part-0.jsonl", [{"id": "7", "prompt_token_ids": [], "token_ids": answer}])
    with pytest.raises(UserError, match=f"row 7 has {says}"):
        quantize(llama, tmp_path, tmp_path / "chats", method="gptq")


def test_a_zero_matrix_has_no_error_and_nan_is_named(tmp_path: Path, tiny_model: Path) -> None:
    name = "model.layers.0.mlp.up_proj"
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{name}.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _, metrics = quantize(folder, tmp_path)
    assert metrics["relative_error"] == metrics["relative_error"]
    for damaged in ("model.norm.weight", f"{name}.weight"):
        tensors[damaged].view(-1)[3] = float("nan")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(tmp_path / "out")
        with pytest.raises(UserError, match=rf"{damaged} has values that are not finite"):
            quantize(folder, tmp_path)


def test_a_broken_expression_is_refused_when_the_config_is_read() -> None:
    with pytest.raises(ValueError, match=r"re:\(: no regular expression"):
        Config(ignore=["re:("])
