import json
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from components.chats.rows import is_held_out, read_rows, write_rows
from components.checkpoint.grid import read_grid
from components.contract.context import Input, Inputs, Output
from components.contract.errors import UserError
from components.contract.log import Log
from components.gptq import folder
from components.gptq.sequence import parts
from components.gptq.stage import Config, run
from components.store.backend import Store
from components.store.work import Work
from tests.components.drafter.conftest import write_chats
from tests.components.gptq.conftest import DRAFT_TOKENS, save_drafter

CONFIG = {
    "group_size": 32,
    "held_out": 0.2,
    "max_length": 64,
    "dtype": "float32",
    "conversations": 12,
    "evaluation_anchors": 4,
}
LINEARS = {"fc"} | {
    f"layers.{layer}.{name}_proj"
    for layer in range(2)
    for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
}


def bind(path: Path) -> Input:
    bound = Input(str(path))
    bound.__dict__["path"] = path
    return bound


def quantize(drafter: Path, target: Path, chats: Path, where: Path, **config) -> tuple[Path, dict]:
    for name in ("out", "scratch"):
        shutil.rmtree(where / name, ignore_errors=True)
        (where / name).mkdir(parents=True)
    output = Output(where / "out", where / "scratch", Work(Store(str(where / "store")), "_work"), Log("gptq"))
    inputs = Inputs({"drafter": [bind(drafter)], "target": [bind(target)], "chats": [bind(chats)]})
    return output.path, run(Config(**CONFIG | config), inputs, output)


@pytest.fixture(scope="module")
def result(drafter_folder, tiny_model, chats, tmp_path_factory):
    return quantize(drafter_folder, tiny_model, chats, tmp_path_factory.mktemp("gptq"))


def test_every_linear_is_quantised_and_nothing_else(result):
    path, metrics = result
    assert set(read_grid(path)) == LINEARS
    assert metrics["quantized"] == len(LINEARS) == 15
    assert json.loads((path / "config.json").read_text())["quantization_config"]["ignore"] == []


def test_gptq_loses_less_than_rounding_on_what_the_linears_see(result):
    error = result[1]["relative_error"]
    assert 0 < error["mean"] < 0.9 * error["rounding_mean"]
    assert set(error["by_linear"]) == LINEARS
    stored = {name: one["stored"] for name, one in error["by_linear"].items()}
    assert error["max"] == stored[error["worst"]] == max(stored.values())
    assert error["mean"] == pytest.approx(sum(stored.values()) / 15)


def test_plain_rounding_is_the_codes_of_the_grid(drafter_folder, tiny_model, chats, target, tmp_path):
    path, metrics = quantize(drafter_folder, tiny_model, chats, tmp_path, method="rtn")
    assert metrics["relative_error"]["mean"] == metrics["relative_error"]["rounding_mean"]
    weights = load_file(drafter_folder / "model.safetensors")
    reloaded = folder.read(path, target)
    for name in LINEARS:
        grouped = weights[f"{name}.weight"].double().unflatten(1, (-1, 32))
        scales = (grouped.abs().amax(-1, keepdim=True) / 7.5).bfloat16().double()
        expected = ((grouped / scales).round().clamp(-8, 7) * scales).flatten(1)
        torch.testing.assert_close(reloaded.get_submodule(name).weight.double(), expected, rtol=1e-6, atol=1e-9)


def test_awq_changes_the_norms_it_scales_and_nothing_else_unquantised(drafter_folder, tiny_model, chats, tmp_path):
    path, metrics = quantize(drafter_folder, tiny_model, chats, tmp_path, method="awq")
    assert metrics["quantized"] == 15
    assert metrics["relative_error"]["mean"] < metrics["relative_error"]["rounding_mean"]
    old, new = load_file(drafter_folder / "model.safetensors"), load_file(path / "model.safetensors")
    kept = {name for name in old if name.removesuffix(".weight") not in LINEARS}
    changed = {name for name in kept if not torch.equal(old[name], new[name])}
    assert changed == {f"layers.{layer}.post_attention_layernorm.weight" for layer in range(2)}


def test_logits_are_compared_on_the_same_blocks(result):
    logits = result[1]["logits"]
    assert logits["slots"] > 0
    assert 0 < logits["kl"] < 0.1
    assert 0 < logits["top1_agreement"] <= 1


def test_a_conversation_over_the_cap_is_left_out_not_cut(drafter_folder, tiny_model, chats, tmp_path):
    rows = list(read_rows(chats))
    lengths = sorted(len(row["prompt_token_ids"]) + len(row["token_ids"]) for row in rows)
    cap = lengths[len(lengths) // 2]
    longer = sum(length > cap for length in lengths)
    _, metrics = quantize(drafter_folder, tiny_model, chats, tmp_path, max_length=cap)
    assert metrics["left_out"] == {"longer": longer, "too_short": 0}
    assert longer > 0
    usable = len(rows) - longer - metrics["held_out"]
    with pytest.raises(UserError, match=f"{usable} usable rows, {usable + 1} are to calibrate on"):
        quantize(drafter_folder, tiny_model, chats, tmp_path, max_length=cap, conversations=usable + 1)


def test_as_many_blocks_as_were_asked_and_answers_with_too_few_places_are_left_out(
    drafter_folder, tiny_model, chats, tmp_path
):
    anchors = 20
    answers = [len(row["token_ids"]) for row in read_rows(chats) if not is_held_out(row["id"], CONFIG["held_out"])]
    short = sum(tokens - 1 < anchors for tokens in answers)
    assert 0 < short < len(answers) - 2
    usable = len(answers) - short
    _, metrics = quantize(drafter_folder, tiny_model, chats, tmp_path, conversations=usable, anchors=anchors)
    assert metrics["left_out"] == {"longer": 0, "too_short": short}
    assert (metrics["conversations"], metrics["blocks"]) == (usable, usable * anchors)
    with pytest.raises(UserError, match=f"{usable} usable rows, {usable + 1} are to calibrate on"):
        quantize(drafter_folder, tiny_model, chats, tmp_path, conversations=usable + 1, anchors=anchors)


def test_the_librarys_unpacking_gives_codes_times_scales_as_the_reloaded_drafter_has_them(result, target):
    path, _ = result
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    tensors = load_file(path / "model.safetensors")
    reloaded = folder.read(path, target)
    for name in LINEARS:
        parts_of = {kind: tensors[f"{name}.weight_{kind}"] for kind in ("packed", "scale", "shape")}
        unpacked = PackedQuantizationCompressor.decompress({f"weight_{k}": v for k, v in parts_of.items()}, scheme)
        ours = reloaded.get_submodule(name).weight
        torch.testing.assert_close(unpacked["weight"].float(), ours, rtol=2**-8, atol=0)


def test_config_and_other_tensors_are_the_drafters_own(result, drafter_folder):
    path, _ = result
    before, after = (json.loads((one / "config.json").read_text()) for one in (drafter_folder, path))
    assert after.pop("quantization_config")["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert after == before
    old, new = load_file(drafter_folder / "model.safetensors"), load_file(path / "model.safetensors")
    kept = {name for name in old if name.removesuffix(".weight") not in LINEARS}
    assert kept == {name for name in new if not name.rpartition(".")[2].startswith("weight_")}
    assert all(torch.equal(old[name], new[name]) for name in kept)


def test_acceptance_is_reported_before_and_after(result):
    accept = result[1]["accept_length"]
    for side in ("before", "after"):
        assert 1 <= accept[side]["low"] <= accept[side]["value"] <= accept[side]["high"]


def test_same_inputs_same_bytes(result, drafter_folder, tiny_model, chats, tmp_path):
    path, _ = quantize(drafter_folder, tiny_model, chats, tmp_path)
    for name in ("model.safetensors", "config.json"):
        assert (path / name).read_bytes() == (result[0] / name).read_bytes()


def test_a_trimmed_vocabulary_comes_along_and_its_head_stays_dense(target, tiny_model, chats, tmp_path):
    source = save_drafter(target, tmp_path / "drafter", DRAFT_TOKENS)
    path, metrics = quantize(source, tiny_model, chats, tmp_path)
    old, new = load_file(source / "model.safetensors"), load_file(path / "model.safetensors")
    assert all(torch.equal(old[name], new[name]) for name in ("d2t", "t2d", "lm_head.weight"))
    assert json.loads((path / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]
    assert metrics["quantized"] == 15


def test_a_width_the_group_does_not_divide_is_refused(drafter_folder, tiny_model, chats, tmp_path):
    with pytest.raises(UserError, match=r"q_proj is 64 wide, which group_size 128 does not divide"):
        quantize(drafter_folder, tiny_model, chats, tmp_path, group_size=128)


def test_too_few_rows_are_refused_with_the_numbers(drafter_folder, tiny_model, chats, tmp_path):
    with pytest.raises(UserError, match=r"2 usable rows give 8 blocks of 4 slots = 32 inputs, fewer than the 128"):
        quantize(drafter_folder, tiny_model, chats, tmp_path, conversations=2, anchors=4)
    with pytest.raises(UserError, match=r"0 usable rows to train on|0 held out"):
        quantize(drafter_folder, tiny_model, write_chats(tmp_path / "one", 1), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32}, r"made for an embedding of \(320, 32\), the target's is \(320, 64\)"),
        ({"vocab_size": 300}, r"made for an embedding of \(300, 64\), the target's is \(320, 64\)"),
        ({"aux_hidden_state_layer_ids": [1, 9]}, r"taps layers \[0, 8\], the target has 4 layers"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, r"taps layers \[-1, 2\], the target has 4 layers"),
        ({"aux_hidden_state_layer_ids": [3, 3]}, r"taps layers \[2, 2\], the target has 4 layers, .* each once"),
        ({"mask_token_id": 1}, r"mask token 1: it occurs in chat row-"),
        ({"mask_token_id": 320}, r"mask token 320, the target's vocabulary has 320"),
    ],
)
def test_a_drafter_for_another_target_is_refused(change, message, drafter_folder, tiny_model, chats, tmp_path):
    other = Path(shutil.copytree(drafter_folder, tmp_path / "drafter"))
    document = json.loads((other / "config.json").read_text())
    place = document if set(change) <= set(document) else document["transformer_layer_config"]
    place.update(change)
    if "vocab_size" in change:
        document["draft_vocab_size"] = change["vocab_size"]
    (other / "config.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=message):
        quantize(other, tiny_model, chats, tmp_path)


def test_chats_of_another_tokenizer_are_refused(drafter_folder, tiny_model, chats, tmp_path):
    rows = list(read_rows(chats))
    (tmp_path / "other").mkdir()
    for row in rows:
        row["token_ids"][3] = 320
    write_rows(tmp_path / "other" / "part-0.jsonl", rows)
    with pytest.raises(UserError, match=r"chat row-\d+: a token id is not among the target's 320"):
        quantize(drafter_folder, tiny_model, tmp_path / "other", tmp_path, conversations=30)


def test_a_quantised_drafter_is_refused(result, tiny_model, chats, tmp_path):
    with pytest.raises(UserError, match="is it quantised already"):
        quantize(result[0], tiny_model, chats, tmp_path)


def test_a_folder_with_a_linear_too_many_or_too_few_is_refused_by_name(result, tmp_path):
    other = Path(shutil.copytree(result[0], tmp_path / "other"))
    with pytest.raises(UserError, match=r"missing layers\.2\.self_attn\.q_proj"):
        folder.check_census(other, LINEARS | {"layers.2.self_attn.q_proj"})
    with pytest.raises(UserError, match=r"unexpected fc"):
        folder.check_census(other, LINEARS - {"fc"})
    tensors = load_file(other / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if not name.startswith("fc.")}
    save_file(tensors | {"fc.weight": torch.zeros(64, 128)}, other / "model.safetensors")
    with pytest.raises(UserError, match=r"stores unquantised: missing none; unexpected fc"):
        folder.check_census(other, LINEARS)


def test_a_drafter_with_a_foreign_linear_is_refused_by_name(drafter):
    drafter.layers[1].mlp.extra = torch.nn.Linear(64, 64)
    with pytest.raises(UserError, match=r"unexpected layers\.1\.mlp\.extra"):
        parts(drafter)
