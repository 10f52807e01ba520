"""A model, its INT4 student and a checkpoint of latents, and the stage run on them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from components.checkpoint.census import unquantized
from components.checkpoint.config import read_config
from components.checkpoint.grid import Quantized, read_grid
from components.checkpoint.quantize import dequantize, integer_codes
from components.checkpoint.tensors import Tensors
from components.checkpoint.unpack import passthrough_tensors
from components.checkpoint.write import save_quantized
from components.contract.context import Input, Inputs, Output
from components.contract.log import Log
from components.pack.stage import Config, run
from components.store.artifact import commit
from components.store.backend import Store
from components.store.work import Work
from tests.components.qad.conftest import random_sequences
from tests.components.tiny_models import build

GROUPS = {"qwen3": 128, "qwen3_5": 32, "qwen3_5_multimodal": 64}
SHAPES = {"qwen3": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}}
MTP = "mtp.layers.0.mlp.up_proj"
PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
DENSE = ("lm_head", "in_proj_a", "in_proj_b", "embed_tokens")


@pytest.fixture(scope="module", params=GROUPS)
def model(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(request.param, tiny_model, tmp_path_factory.mktemp("model"), **SHAPES.get(request.param, {}))


def build_model(kind: str, tiny_model: Path, root: Path, **shape: int) -> Path:
    """Build a random model, with the tiny model's tokenizer, in a folder that has its kind's name."""
    folder = build(kind, root / kind, **shape)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / name, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    for name in PROCESSORS if "multimodal" in kind else ():
        (folder / name).write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor", "file": name}))
    return folder


@pytest.fixture(scope="module")
def student(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An INT4 checkpoint; the multimodal hybrid has a quantised MTP."""
    more = {MTP: grid_of(torch.randn(64, 64).bfloat16(), 64)} if "multimodal" in model.name else {}
    return quantize(model, tmp_path_factory.mktemp("student"), GROUPS[model.name], more)


def quantize(
    model: Path, folder: Path, group: int, more: dict[str, Quantized] | None = None, norms: float = 1.5
) -> Path:
    """Write the INT4 checkpoint of a model, its norms times ``norms``: other than the model's, as AWQ leaves them."""
    tensors = Tensors(model)
    names = [n.removesuffix(".weight") for n in tensors if len(tensors.shape(n)) == 2 and "visual" not in n]
    names = [n for n in names if n.rpartition(".")[2] not in DENSE]
    modules = {name: grid_of(tensors[f"{name}.weight"], group) for name in names} | (more or {})
    others = {n: t * norms if "norm" in n else t for n, t in passthrough_tensors(tensors) if n[:-7] not in modules}
    ignore = unquantized(model, tensors, modules)
    config = read_config(model)
    save_quantized(
        folder, modules=modules.items(), others=others.items(), config=config, ignore=ignore, sidecars=model
    )
    return folder


def grid_of(weight: torch.Tensor, group: int) -> Quantized:
    scales = (weight.float().unflatten(1, (-1, group)).abs().amax(-1) / 7.5).bfloat16()
    return Quantized(integer_codes(weight, scales), scales, group)


def train(student: Path, folder: Path, noise: float, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a checkpoint whose latents moved by ``noise`` steps of the grid."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, quantized in read_grid(student).items():
        if name == MTP:
            continue
        latents = dequantize(quantized.codes, quantized.scales, torch.float32)
        step = quantized.scales.float().repeat_interleave(quantized.group_size, 1)
        latents += noise * step * torch.randn(latents.shape, generator=generator)
        tensors |= {f"{name}.weight": latents.to(dtype), f"{name}.weight_scale": quantized.scales}
    folder.mkdir()
    save_file(tensors, folder / "latents.safetensors")
    return folder


def chosen(latents: Path, tmp_path: Path, of: str = "0") -> dict[str, list[Input]]:
    """Commit a checkpoint as step 8 of a qad artifact beside a broken step 4, and the choice of step 8."""
    store, qad = Store(str(tmp_path / "store")), tmp_path / "qad"
    shutil.copytree(latents, qad / "checkpoints/step-8")
    (qad / "checkpoints/step-4").mkdir()
    (qad / "checkpoints/step-4/latents.safetensors").write_text("not read")
    (tmp_path / "select").mkdir()
    (tmp_path / "select/scores.json").write_text(json.dumps({"chosen": 8, "qad": of.ljust(64, "0")}))
    trained, _ = commit(store, "qad", "0" * 64, qad, {"metrics": {}})
    choice, _ = commit(store, "select", "1" * 64, tmp_path / "select", {"metrics": {}})
    return {"qad": [Input(trained.uri)], "selected": [Input(choice.uri)]}


def pack(
    latents: Path, student: Path, model: Path, tmp_path: Path, of: str = "0", vocabulary: int = 320, **settings: object
) -> tuple[Path, dict]:
    bound = chosen(latents, tmp_path, of)
    for name in ("out", "scratch", "sequences"):
        (tmp_path / name).mkdir()
    sequences = random_sequences(tmp_path / "sequences", vocabulary)
    for port, folder in {"student": student, "model": model, "sequences": sequences}.items():
        bound[port] = [Input(str(folder))]
        bound[port][0].__dict__["path"] = folder
    work = Work(Store(str(tmp_path / "store")), "_work")
    output = Output(tmp_path / "out", tmp_path / "scratch", work, Log("pack"))
    return output.path, run(Config(**settings), Inputs(bound), output)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))


@pytest.fixture
def latents(student: Path, tmp_path: Path) -> Path:
    return train(student, tmp_path / "selected", 0.3)
