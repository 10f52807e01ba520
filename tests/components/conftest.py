"""Small real parts that tests of several stages share: a model with a tokenizer, a drafter for it, one server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
VOCABULARY, HIDDEN, INNER, HEADS, HEAD = 320, 64, 128, 2, 32
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
LAYER = {
    "self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj.weight": (HEAD, HIDDEN),
    "self_attn.v_proj.weight": (HEAD, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
    "self_attn.q_norm.weight": (HEAD,),
    "self_attn.k_norm.weight": (HEAD,),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}
CORPUS = "A small model answers short questions about cats, dogs, prime numbers and the capital of France. user system"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random 4-layer Qwen3 model (hidden size 64, float32) and a byte-level tokenizer."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random one-layer DFlash drafter for ``tiny_model``: block size 4, taps after layers 1 and 3."""
    return build_tiny_draft(tmp_path_factory.mktemp("tiny-draft"))


@pytest.fixture(scope="session")
def server(tiny_model: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """The session's one vLLM server: ``tiny_model`` with ``tiny_draft`` in float32, exact on this model."""
    from components.serving.profiles import CPU
    from components.serving.server import Server

    log = tmp_path_factory.mktemp("server") / "vllm.log"
    profile = CPU.model_copy(update={"dtype": "float32", "max_model_len": 512})
    with Server(tiny_model, tiny_draft, profile, log_path=log) as running:
        running.wait()
        yield running


def build_tiny_model(folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        [CORPUS], trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    config = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4, **SHAPE}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(4):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in LAYER.items()}
    generator = torch.Generator().manual_seed(0)
    save_file(_random(shapes, generator), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def build_tiny_draft(folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    config = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "block_size": 4,
        "is_causal": False,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3]},
        **SHAPE,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    shapes |= {f"layers.0.{name}": shape for name, shape in LAYER.items()}
    save_file(_random(shapes, torch.Generator().manual_seed(1)), folder / "model.safetensors")
    return folder


def _random(shapes: dict, generator: Any) -> dict:
    import torch

    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.2
        for name, shape in shapes.items()
    }
