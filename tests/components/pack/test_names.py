"""The true Qwen3.5-4B by its names and shapes: headers without values, read as an INT4 checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from components.checkpoint.census import check_fused, skeleton, stored_modules, unquantized
from components.checkpoint.config import read_config
from components.checkpoint.grid import PACKED, SCALE, SHAPE, Quantized, quantized_modules
from components.checkpoint.quantize import dequantize
from components.checkpoint.tensors import Tensors
from components.checkpoint.unpack import passthrough_names
from components.checkpoint.write import quantization_config, save_quantized

CONFIG = Path(__file__).parents[1] / "qwen3_5_4b.json"
VLLM = Path(sys.prefix).parent / "vllm/bin/python"
GDN, ATTENTION, MLP = ("in_proj_qkv", "in_proj_z", "out_proj"), "qkvo", ("gate_proj", "up_proj", "down_proj")
TEXT = "model.language_model."
MTP = "mtp.layers.0"
BYTES = {"I32": 4, "BF16": 2, "I64": 8}


def expected_modules() -> set[str]:
    """The 200 linears of the paper's recipe: every fourth layer attends, the others are gated delta nets."""
    names = set()
    for layer in range(32):
        prefix = f"model.language_model.layers.{layer}"
        names |= {f"{prefix}.mlp.{one}" for one in MLP}
        if layer % 4 == 3:
            names |= {f"{prefix}.self_attn.{one}_proj" for one in ATTENTION}
        else:
            names |= {f"{prefix}.linear_attn.{one}" for one in GDN}
    return names


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An INT4 checkpoint whose 8 GB of values are a hole in the file: nothing may read them."""
    folder = tmp_path_factory.mktemp("4b")
    (folder / "config.json").write_bytes(CONFIG.read_bytes())
    linears = {f"{MTP}.self_attn.{one}_proj": (2560, 2560) for one in ATTENTION}
    linears |= {f"{MTP}.mlp.{one}": (2560, 9216) for one in MLP}
    shapes = {name: tuple(one.shape) for name, one in skeleton(folder).named_parameters() if name != "lm_head.weight"}
    linears |= {name: shapes.pop(f"{name}.weight") for name in expected_modules()}
    tensors = {name: ("BF16", shape) for name, shape in shapes.items()}
    tensors |= {"mtp.fc.weight": ("BF16", (2560, 5120)), "mtp.norm.weight": ("BF16", (2560,))}
    for name, (rows, columns) in linears.items():
        tensors |= {f"{name}.{PACKED}": ("I32", (rows, columns // 8)), f"{name}.{SHAPE}": ("I64", (2,))}
        tensors[f"{name}.{SCALE}"] = ("BF16", (rows, columns // 32))
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + torch.Size(shape).numel() * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(folder / "model.safetensors", 8 + len(text) + end)
    return folder


def test_what_is_quantised_and_what_is_carried(folder: Path):
    tensors = Tensors(folder)
    modules = quantized_modules(tensors)
    assert len(expected_modules()) == 200
    assert set(modules) & stored_modules(skeleton(folder), tensors) == expected_modules()
    assert sum(name.startswith("mtp.") for name in modules) == 7
    dense = unquantized(folder, tensors, modules)
    check_fused(folder, modules, dense)
    text = {name for name in dense if "visual" not in name}
    gates = {f"model.language_model.layers.{i}.linear_attn.in_proj_{k}" for i in range(32) if i % 4 != 3 for k in "ab"}
    assert text == gates | {"lm_head", "mtp.fc"}
    visual = {name for name in dense if "visual" in name}
    assert {f"model.visual.blocks.{i}.{k}" for i in range(24) for k in ("attn.qkv", "mlp.linear_fc1")} < visual
    carried = set(passthrough_names(tensors))
    layer = "model.language_model.layers.0.linear_attn"
    assert {f"{layer}.conv1d.weight", f"{layer}.A_log", f"{layer}.dt_bias", f"{layer}.in_proj_a.weight"} < carried
    assert {"model.language_model.embed_tokens.weight", "mtp.norm.weight", "model.visual.pos_embed.weight"} < carried
    assert "lm_head.weight" not in carried


def test_the_library_quantises_the_same_modules(folder: Path):
    tensors = Tensors(folder)
    declared = quantization_config(32, unquantized(folder, tensors, quantized_modules(tensors)))
    model = skeleton(folder)
    apply_quantization_config(model, QuantizationConfig.model_validate(declared))
    found = {name for name, one in model.named_modules() if hasattr(one, "quantization_scheme")}
    assert found == expected_modules()


def test_the_library_quantises_the_same_modules_of_the_text_model_alone(folder: Path):
    tensors = Tensors(folder)
    declared = quantization_config(32, unquantized(folder, tensors, quantized_modules(tensors)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder).get_text_config())
    apply_quantization_config(model, QuantizationConfig.model_validate(declared))
    found = {name for name, one in model.named_modules() if hasattr(one, "quantization_scheme")}
    assert found == {name.replace("language_model.", "") for name in expected_modules()}
    linears = {name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    stored = set(unquantized(folder, tensors, quantized_modules(tensors)))
    assert set(declared["ignore"]) == stored | (linears - found)


ASK_VLLM = """
import copy, json, sys
import torch
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.models import qwen3_5
from vllm.plugins import load_general_plugins
declared, trees, folders, rendezvous = json.load(sys.stdin)
answer = {}
for architecture, names in trees.items():
    model = getattr(qwen3_5, architecture)
    config = CompressedTensorsConfig.from_config(copy.deepcopy(declared))
    config.apply_vllm_mapper(model.hf_to_vllm_mapper)
    dense = [name for name in names if should_ignore_layer(name, config.ignore, model.packed_modules_mapping)]
    weights = config.target_scheme_map["Linear"]["weights"]
    answer[architecture] = [dense, weights.num_bits, weights.group_size, weights.symmetric]
load_general_plugins()
with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
    initialize_model_parallel(1)
    for folder in folders:
        config = CompressedTensorsConfig.from_config(json.load(open(f"{folder}/config.json"))["quantization_config"])
        stored = {name.rpartition(".")[2]: tensor for name, tensor in load_file(f"{folder}/model.safetensors").items()}
        rows, columns = stored["weight_shape"].tolist()
        layer = ReplicatedLinear(columns, rows, False, params_dtype=torch.bfloat16, quant_config=config, prefix="a.b")
        for name, parameter in layer.named_parameters():
            parameter.weight_loader(parameter, stored[name])
        layer.quant_method.process_weights_after_loading(layer)
        weight = layer(torch.eye(columns, dtype=torch.bfloat16))[0].T.contiguous()
        save_file({"weight": weight}, f"{folder}/vllm.safetensors")
print(json.dumps(answer))
"""
GROUPS = (32, 64, 128)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Quantized]:
    """A folder of one linear per group size: every code with scales of every size."""
    made = {}
    for group in GROUPS:
        generator = torch.Generator().manual_seed(group)
        codes = torch.randint(-8, 8, (96, 256), generator=generator, dtype=torch.int8)
        scales = torch.rand(96, 256 // group, generator=generator).mul(0.3).add(0.001).bfloat16()
        folder = tmp_path_factory.mktemp("group")
        made[folder] = Quantized(codes, scales, group)
        save_quantized(folder, modules=[("a.b", made[folder])], others=[], config={}, ignore=[], sidecars=folder)
    return made


@pytest.fixture(scope="module")
def vllm(folder: Path, weights: dict[Path, Quantized], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """What vLLM makes of the config in both trees; it also writes what its linears make of the weights."""
    tensors = Tensors(folder)
    declared = quantization_config(32, unquantized(folder, tensors, quantized_modules(tensors)))
    rendezvous = str(tmp_path_factory.mktemp("gloo") / "store")
    asked = subprocess.run(
        [VLLM, "-c", ASK_VLLM],
        input=json.dumps([declared, served_names(), list(map(str, weights)), rendezvous]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr[-2000:]
    return json.loads(asked.stdout.splitlines()[-1])


def served_names() -> dict[str, list[str]]:
    """The linears by vLLM's names, fused as it fuses them, in the whole model and in the text model alone."""
    fused = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj", "in_proj_qkv": "in_proj_qkvz"}
    served = {name: fused.get(name.rpartition(".")[2], name.rpartition(".")[2]) for name in expected_modules()}
    quantized = {f"{name.rpartition('.')[0]}.{last}" for name, last in served.items()}
    gates = {f"model.language_model.layers.{i}.linear_attn.in_proj_ba" for i in range(32) if i % 4 != 3}
    text, vision = sorted(quantized | gates), [f"visual.blocks.{i}.attn.qkv" for i in range(24)]
    return {
        "Qwen3_5ForConditionalGeneration": [name.replace(TEXT, "language_model.model.") for name in text] + vision,
        "Qwen3_5ForCausalLM": [name.replace(TEXT, "model.") for name in text],
    }


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"])
def test_vllm_reads_the_same_from_the_config(vllm: dict[str, list], tree: str, folder: Path):
    dense, *scheme = vllm[tree]
    assert set(dense) == {name for name in served_names()[tree] if "in_proj_ba" in name or "visual" in name}
    assert scheme == [4, 32, True]
    assert read_config(folder)["tie_word_embeddings"]


@pytest.mark.slow
@pytest.mark.usefixtures("vllm")
def test_vllms_linears_compute_with_codes_times_scales(weights: dict[Path, Quantized]):
    for folder, quantized in weights.items():
        found = load_file(folder / "vllm.safetensors")["weight"]
        assert torch.equal(found, dequantize(quantized.codes, quantized.scales)), quantized.group_size
