"""Random models of the architectures this project quantises, small enough to build in every test session."""

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
HYBRID = {
    **SHAPE,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "tie_word_embeddings": True,
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
KINDS = ("llama", "qwen3", "qwen3_5", "qwen3_5_multimodal")


def build(kind: str, folder: Path, **shape: int) -> Path:
    """Save a random BF16 model; llama has its own output head, the others tie it; qwen3 may have another shape."""
    torch.manual_seed(0)
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE | shape, tie_word_embeddings=True))
    elif kind == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts, tie_word_embeddings=True))
    elif kind == "qwen3_5":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID))
    else:
        config = Qwen3_5Config(text_config=HYBRID, vision_config=VISION, tie_word_embeddings=True)
        model = Qwen3_5ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
