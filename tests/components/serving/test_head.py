"""A target whose output head is INT4 on a grid of its own, loaded and answering in the real vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from components.checkpoint.config import read_config
from components.checkpoint.grid import Quantized
from components.checkpoint.load import load_model
from components.checkpoint.quantize import integer_codes
from components.checkpoint.tensors import Tensors
from components.checkpoint.write import save_quantized, untied_config
from components.serving.arguments import environment, speculative_config
from components.serving.profiles import CPU

ANSWER = """
import json, sys
from vllm import LLM, SamplingParams
drafter = json.loads(sys.argv[3])
llm = LLM(
    sys.argv[1], dtype="float32", max_model_len=128, enforce_eager=True, speculative_config=drafter,
    enable_chunked_prefill=None if drafter else False, disable_log_stats=False,
)
asked = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])]
found = llm.generate(asked, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
drafts = [one.value for one in llm.get_metrics() if one.name == "vllm:spec_decode_num_drafts"]
print("ANSWERS", json.dumps([sum(drafts), [list(one.outputs[0].token_ids) for one in found]]), flush=True)
import os
os._exit(0)
"""
PROMPTS = [[10, 11, 12], [40, 7, 99, 3, 200], [310]]


def quantized_with_head(source: Path, destination: Path) -> Path:
    """Round every projection and a head made from the tied embedding, the head in groups of its own size."""
    tensors = Tensors(source)
    modules = []
    for name in (*(one for one in tensors if one.endswith("_proj.weight")), "model.embed_tokens.weight"):
        module = "lm_head" if "embed" in name else name.removesuffix(".weight")
        group = 64 if module == "lm_head" else 32
        weight = tensors[name]
        scales = (weight.unflatten(-1, (-1, group)).abs().amax(-1) / 7.5).bfloat16()
        modules.append((module, Quantized(integer_codes(weight, scales), scales, group)))
    others = ((name, tensors[name]) for name in tensors if not name.endswith("_proj.weight"))
    config = untied_config(read_config(source))
    save_quantized(destination, modules=modules, others=others, config=config, ignore=[], sidecars=source)
    return destination


@pytest.mark.slow
@pytest.mark.parametrize("drafted", [False, True], ids=["alone", "under a drafter"])
def test_an_int4_head_answers_as_its_dense_twin(
    tiny_model: Path, tiny_draft: Path, tmp_path: Path, drafted: bool
) -> None:
    """The drafter has no head of its own: it takes the target's."""
    folder = quantized_with_head(tiny_model, tmp_path / "target")
    drafter = speculative_config(CPU, tiny_draft) if drafted else None
    argv = [sys.executable, "-c", ANSWER, str(folder), json.dumps(PROMPTS), json.dumps(drafter)]
    done = subprocess.run(
        argv, env={**os.environ, **environment(CPU)}, capture_output=True, text=True, timeout=400, check=False
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert said, (done.stdout + done.stderr)[-3000:]
    drafts, answers = json.loads(said[0].removeprefix("ANSWERS "))
    assert (drafts > 0) == drafted
    twin = load_model(folder, torch.float32)
    assert not torch.equal(twin.lm_head.weight, twin.get_input_embeddings().weight)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.inference_mode():
            logits = twin(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        behind = logits.amax(-1) - logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        assert behind.max() < 1e-3
