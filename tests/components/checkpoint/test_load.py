import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from components.checkpoint.census import locate
from components.checkpoint.grid import read_grid
from components.checkpoint.load import load_model, load_tokenizer
from components.checkpoint.quantize import dequantize
from components.checkpoint.tensors import Tensors
from components.checkpoint.unpack import unpack
from components.contract.errors import UserError
from tests.components.tiny_models import build

TOKENS = torch.arange(7, 47)[None]


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=TOKENS).logits


def test_packed_folder_computes_what_transformers_own_loader_computes(packed: tuple[Path, dict]):
    folder, dense = packed
    ours = load_model(folder)
    assert not ours.training
    assert ours.config._attn_implementation == "sdpa"
    names = locate(ours, dense)
    assert set(names) == set(dense)
    for stored, inner in names.items():
        assert torch.equal(ours.get_submodule(inner).weight, dense[stored])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert torch.equal(logits(ours), logits(theirs))


def test_dense_folder_computes_what_transformers_own_loader_computes(dense_folder: Path):
    theirs = AutoModelForCausalLM.from_pretrained(dense_folder, dtype=torch.bfloat16)
    assert torch.equal(logits(load_model(dense_folder)), logits(theirs))


def test_float32_weights_are_the_exact_products(llama: Path):
    model = load_model(llama, torch.float32)
    for module, quantized in read_grid(llama).items():
        exact = dequantize(quantized.codes, quantized.scales, torch.float64)
        assert torch.equal(model.get_submodule(module).weight.double(), exact)


def test_dense_twin_has_the_same_tensors(packed: tuple[Path, dict], tmp_path: Path):
    folder, dense = packed
    unpack(folder, tmp_path / "twin")
    twin, stored = Tensors(tmp_path / "twin"), Tensors(folder)
    assert "quantization_config" not in json.loads((tmp_path / "twin/config.json").read_text())
    assert {name for name in twin if name.removesuffix(".weight") in dense} == {f"{name}.weight" for name in dense}
    for name in twin:
        assert torch.equal(twin[name], dense[m] if (m := name.removesuffix(".weight")) in dense else stored[name])
    assert torch.equal(logits(load_model(tmp_path / "twin")), logits(load_model(folder)))


def test_packed_weights_that_no_config_declares_are_refused(llama: Path, tmp_path: Path):
    folder = shutil.copytree(llama, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    for read in (load_model, lambda one: unpack(one, tmp_path / "twin")):
        with pytest.raises(UserError, match=r"config\.json: no quantization_config"):
            read(folder)
    assert not list(tmp_path.glob("twin/model*"))


def test_refuses_missing_and_unexpected_tensors(llama: Path, tmp_path: Path):
    shutil.copytree(llama, tmp_path / "m")
    tensors = load_file(llama / "model.safetensors")
    save_file(tensors | {"model.layers.0.odd.weight": torch.ones(2)}, tmp_path / "m/model.safetensors")
    with pytest.raises(UserError, match=r"unexpected keys in its tensors: model\.layers\.0\.odd\.weight"):
        load_model(tmp_path / "m")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "m/model.safetensors")
    with pytest.raises(UserError, match=r"missing keys in its tensors: model\.norm\.weight"):
        load_model(tmp_path / "m")


def test_refuses_what_is_no_model(llama: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"config\.json: missing"):
        load_model(tmp_path)
    with pytest.raises(UserError, match="no tokenizer"):
        load_tokenizer(llama)
    with pytest.raises(UserError, match="its vocabulary is empty"):
        load_tokenizer(build("qwen3", tmp_path / "qwen3"))
    (tmp_path / "config.json").write_text('{"model_type": "bolt"}')
    with pytest.raises(UserError, match="not a causal language model"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model')
    with pytest.raises(UserError, match="torn"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", '{"text_config": null}', '{"hidden_size": "x"}', '{"num_attention_heads": 0}', '{"a": "caf\xe9"}']
)
def test_a_config_of_other_types_is_refused_in_words(llama: Path, tmp_path: Path, text: str):
    folder = tmp_path / "m"
    shutil.copytree(llama, folder)
    config = json.loads((folder / "config.json").read_text())
    if text.startswith(('{"h', '{"n')):
        text = json.dumps(config | json.loads(text))
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"config\.json"):
        load_model(folder)


def test_a_weight_of_another_shape_is_named(llama: Path, tmp_path: Path):
    shutil.copytree(llama, tmp_path / "m")
    tensors = load_file(llama / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5].clone()
    save_file(tensors, tmp_path / "m/model.safetensors")
    with pytest.raises(UserError, match=r"mismatched keys in its tensors: .*model\.norm\.weight"):
        load_model(tmp_path / "m")
