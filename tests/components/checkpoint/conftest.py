"""A quantised folder of every architecture, made with compressed-tensors' own compressor."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file

from tests.components.tiny_models import KINDS, build

WEIGHTS = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
SCHEME = QuantizationScheme(targets=["Linear"], weights=WEIGHTS)
IGNORED = ("lm_head", "in_proj_a", "in_proj_b")


def is_quantized(name: str, tensor: torch.Tensor) -> bool:
    """What the tiny quantised folders quantise: every linear of the text layers but the ignored ones."""
    module = name.removesuffix(".weight")
    return ".layers." in name and tensor.ndim == 2 and module.rpartition(".")[2] not in IGNORED


def compress(folder: Path, destination: Path, group: int = 32) -> dict[str, torch.Tensor]:
    """Quantise with the library alone; return the dense weights it dequantises to, by module."""
    scheme = SCHEME.model_copy(update={"weights": WEIGHTS.model_copy(update={"group_size": group})})
    shutil.copytree(folder, destination)
    tensors, dense = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not is_quantized(name, tensor):
            tensors[name] = tensor
            continue
        module = name.removesuffix(".weight")
        scale = tensor.float().unflatten(1, (-1, group)).abs().amax(-1).div(7.5).bfloat16()
        packed = PackedQuantizationCompressor.compress({"weight": tensor, "weight_scale": scale}, scheme)
        dense[module] = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
        tensors |= {f"{module}.{kind}": value for kind, value in packed.items()}
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    ignore = ["re:.*lm_head", "re:.*in_proj_[ab]$", "re:.*visual.*"]
    quantization = QuantizationConfig(
        config_groups={"group_0": scheme}, format="pack-quantized", quantization_status="compressed", ignore=ignore
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization.model_dump(mode="json")
    (destination / "config.json").write_text(json.dumps(config))
    return dense


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def dense_folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(kind, tmp_path_factory.mktemp("dense") / kind)


@pytest.fixture(scope="session")
def packed(dense_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A W4A16 folder by the library, and the dense weights it stands for."""
    folder = tmp_path_factory.mktemp("packed") / dense_folder.name
    return folder, compress(dense_folder, folder)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A W4A16 folder to damage: copy it first."""
    root = tmp_path_factory.mktemp("llama")
    compress(build("llama", root / "dense"), root / "packed")
    return root / "packed"
