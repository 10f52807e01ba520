"""Turns a GGUF file into a model folder: dequantised weights as BF16 safetensors, with the file's own tokenizer.

A GGUF model that transformers loaded refuses to be saved, and the tokenizer it rebuilds guesses the end token. So the
weights go into a fresh model of the same config, and every special token is taken from the ids the file declares.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Write ``gguf`` into ``folder`` as a HF model in BF16.

    The weights are the dequantised ones (fp32), rounded to BF16 once: a Q4 file gives the model that the file stores,
    not the model it was made from.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _parsed_once():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    values = {
        name: _shortest(value)
        for name, value in loaded.config.to_dict().items()
        if name not in ("quantization_config", "_name_or_path")
    }
    config = type(loaded.config).from_dict(values | {"dtype": "bfloat16"})
    model = type(loaded)(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    for name in ("bos", "eos", "pad", "unk"):
        token_id = getattr(config, f"{name}_token_id", None)
        if token_id is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token_id))
            setattr(model.generation_config, f"{name}_token_id", token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Keep what transformers asks of a file again and again: its parsed form (3 times) and names (once a module)."""
    import gguf

    kept = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in kept.items():
            setattr(gguf, name, functools.cache(function))
        yield
    finally:
        for name, function in kept.items():
            setattr(gguf, name, function)


def _shortest(value: object) -> object:
    """Undo fp32 noise: GGUF stores 1e-5 as the nearest fp32, which reads back as 9.999999747378752e-06."""
    import numpy

    return float(str(numpy.float32(value))) if isinstance(value, float) else value
