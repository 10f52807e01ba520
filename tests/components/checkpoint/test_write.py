import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from components.checkpoint.census import check_fused, compare, unquantized
from components.checkpoint.config import read_config
from components.checkpoint.grid import Quantized, iterate_grid, read_grid
from components.checkpoint.load import load_model
from components.checkpoint.tensors import INDEX, Tensors
from components.checkpoint.unpack import passthrough_tensors
from components.checkpoint.write import save_quantized
from components.contract.errors import UserError
from tests.components.tiny_models import build


def rewrite(folder: Path, destination: Path, **options: int) -> None:
    tensors = Tensors(folder)
    save_quantized(
        destination,
        modules=iterate_grid(tensors),
        others=passthrough_tensors(tensors),
        config=read_config(folder),
        ignore=unquantized(folder, tensors, read_grid(folder)),
        sidecars=folder,
        **options,
    )


def test_written_folder_holds_the_librarys_bytes(packed: tuple[Path, dict], kind: str, tmp_path: Path):
    folder, dense = packed
    rewrite(folder, tmp_path / "w")
    written, original = load_file(tmp_path / "w/model.safetensors"), load_file(folder / "model.safetensors")
    assert set(written) == set(original)
    for name, tensor in original.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor)
    assert any("lm_head" in name for name in written) == (kind == "llama")
    config = QuantizationConfig.model_validate(read_config(tmp_path / "w")["quantization_config"])
    assert config.format == "pack-quantized"
    model = load_model(folder)
    linears = {name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    inner = {name.replace("language_model.", "") for name in dense}
    assert {name.replace("language_model.", "") for name in config.ignore if "visual" not in name} == linears - inner
    assert any("visual" in name for name in config.ignore) == (kind == "qwen3_5_multimodal")


def test_shards_and_index_above_the_limit(llama: Path, tmp_path: Path):
    rewrite(llama, tmp_path / "w", max_shard_bytes=40_000)
    index = json.loads((tmp_path / "w" / INDEX).read_text())
    shards = sorted(path.name for path in (tmp_path / "w").glob("*.safetensors"))
    assert len(shards) > 2
    assert set(index["weight_map"].values()) == set(shards)
    original = Tensors(llama)
    assert index["metadata"]["total_size"] == sum(original[name].nbytes for name in original)
    assert all(torch.equal(Tensors(tmp_path / "w")[name], original[name]) for name in original)
    model = load_model(tmp_path / "w")
    assert torch.equal(model.lm_head.weight, original["lm_head.weight"])


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 20), groups=st.integers(1, 4), size=st.sampled_from([8, 32, 64, 128]), seed=st.integers(0, 999)
)
def test_any_codes_come_back(rows: int, groups: int, size: int, seed: int, tmp_path_factory: pytest.TempPathFactory):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (rows, groups * size), generator=generator, dtype=torch.int8)
    scales = torch.rand(rows, groups, generator=generator) + 0.1
    folder = tmp_path_factory.mktemp("any")
    modules = [("a.b", Quantized(codes, scales, size))]
    save_quantized(folder, modules=modules, others=[], config={}, ignore=[], sidecars=folder)
    back = read_grid(folder)["a.b"]
    assert torch.equal(back.codes, codes)
    assert torch.equal(back.scales, scales)
    assert back.group_size == size


def test_a_tied_head_is_not_written(packed: tuple[Path, dict], kind: str, tmp_path: Path):
    folder, _ = packed
    stored = {"lm_head.weight": torch.ones(320, 64, dtype=torch.bfloat16)}
    source = tmp_path / "s"
    source.mkdir()
    (source / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(load_file(folder / "model.safetensors") | stored, source / "model.safetensors")
    rewrite(source, tmp_path / "w")
    assert ("lm_head.weight" in Tensors(tmp_path / "w")) == (kind == "llama")


def test_ignore_lists_matrices_that_the_architecture_lacks(llama: Path, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    extra = {"mtp.fc.weight": torch.ones(4, 4), "mtp.norm.weight": torch.ones(4)}
    save_file(load_file(llama / "model.safetensors") | extra, tmp_path / "model.safetensors")
    assert unquantized(tmp_path, Tensors(tmp_path), read_grid(llama)) == ["lm_head", "mtp.fc"]


def test_ignore_lists_the_router_of_experts(tmp_path: Path):
    """To transformers it is no linear, to vLLM it is."""
    build("qwen3_moe", tmp_path)
    tensors = Tensors(tmp_path)
    experts = [n.removesuffix(".weight") for n in tensors if ".experts." in n]
    attention = {f"model.layers.{layer}.self_attn.{one}_proj" for layer in range(2) for one in "qkvo"}
    gates = {f"model.layers.{layer}.mlp.gate" for layer in range(2)}
    assert len(experts) == 2 * 4 * 3
    assert set(unquantized(tmp_path, tensors, experts)) == attention | gates | {"lm_head"}


def test_mixed_group_sizes_are_refused(tmp_path: Path):
    one = Quantized(torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 2), 32)
    two = Quantized(torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 1), 64)
    with pytest.raises(UserError, match="a has 4 bits in groups of 32 and b has 4 bits in groups of 64"):
        save_quantized(tmp_path, modules=[("a", one), ("b", two)], others=[], config={}, ignore=[], sidecars=tmp_path)


def test_only_a_head_may_have_eight_bits(tmp_path: Path):
    body = Quantized(torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 2), 32)
    wide = Quantized(torch.tensor([[-128, 127] * 32] * 2, dtype=torch.int8), torch.ones(2, 1), 64, 8)
    save_quantized(
        tmp_path, modules=[("a", body), ("lm_head", wide)], others=[], config={}, ignore=[], sidecars=tmp_path
    )
    back = read_grid(tmp_path)
    assert torch.equal(back["lm_head"].codes, wide.codes)
    assert [(one.bits, one.group_size) for one in back.values()] == [(4, 32), (8, 64)]
    with pytest.raises(UserError, match="w: a has 8 bits in groups of 64"):
        save_quantized(tmp_path / "w", modules=[("a", wide)], others=[], config={}, ignore=[], sidecars=tmp_path)
    with pytest.raises(UserError, match="nothing but a head is quantised"):
        save_quantized(tmp_path / "w", modules=[("lm_head", wide)], others=[], config={}, ignore=[], sidecars=tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for kind in ("packed", "scale", "shape"):
        tensors[f"a.weight_{kind}"] = tensors[f"lm_head.weight_{kind}"].clone()
    (tmp_path / "body").mkdir()
    save_file(tensors, tmp_path / "body/model.safetensors")
    (tmp_path / "body/config.json").write_bytes((tmp_path / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"a: weight_packed .* does not hold 4-bit codes"):
        read_grid(tmp_path / "body")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(UserError, match=r"lm_head is packed, but config\.json has tie_word_embeddings"):
        read_grid(tmp_path)
    config["quantization_config"]["config_groups"]["group_1"]["weights"]["num_bits"] = 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"lm_head.*does not hold 4-bit codes"):
        read_grid(tmp_path)


def test_census_names_differences_both_ways():
    compare(["a", "b"], ["b", "a"], "census")
    with pytest.raises(UserError, match="census: missing c; unexpected a"):
        compare(["a", "b"], ["b", "c"], "census")


@pytest.mark.parametrize("member", ["self_attn.k_proj", "mlp.up_proj", "linear_attn.in_proj_z"])
def test_fused_linears_are_quantised_together(member: str):
    names = {"self_attn.k_proj": "self_attn.q_proj", "mlp.up_proj": "mlp.gate_proj"}
    partner = names.get(member, "linear_attn.in_proj_qkv")
    check_fused(Path("m"), [f"l.0.{member}", f"l.0.{partner}"], ["l.1.mlp.gate_proj", "l.0.linear_attn.in_proj_a"])
    with pytest.raises(UserError, match=f"m: l.0.{member} is quantised but l.0.{partner} not"):
        check_fused(Path("m"), [f"l.0.{member}"], [f"l.0.{partner}"])
