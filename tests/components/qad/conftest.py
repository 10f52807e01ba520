"""A tiny teacher, its INT4 student (round to nearest) and sequences of random tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from components.checkpoint.config import read_config
from components.checkpoint.grid import Quantized
from components.checkpoint.quantize import integer_codes
from components.checkpoint.tensors import Tensors
from components.checkpoint.write import save_quantized
from components.sequences.packing import document, pack


def quantize_folder(source: Path, destination: Path, group: int = 32) -> Path:
    """Round every projection to INT4 on the grid absmax / 7.5, scales in bf16."""
    tensors = Tensors(source)
    modules, others = [], []
    for name in tensors:
        weight = tensors[name]
        if name.endswith("_proj.weight"):
            scales = (weight.unflatten(-1, (-1, group)).abs().amax(-1) / 7.5).bfloat16()
            modules.append((name.removesuffix(".weight"), Quantized(integer_codes(weight, scales), scales, group)))
        else:
            others.append((name, weight))
    save_quantized(
        destination, modules=modules, others=others, config=read_config(source), ignore=["lm_head"], sidecars=source
    )
    return destination


def random_sequences(folder: Path, vocabulary: int, length: int = 32, rows: int = 40) -> Path:
    generator = np.random.default_rng(0)
    sizes = {}
    for split, count in (("train", rows), ("val", rows // 4)):
        documents = []
        for i in range(count):
            prompt, answer = (generator.integers(4, vocabulary, generator.integers(5, 30)).tolist() for _ in range(2))
            row = {"id": str(i), "prompt_token_ids": prompt, "token_ids": answer, "finish_reason": "stop"}
            documents.append(document(row, 2, vocabulary, "answer"))
        sizes[split] = pack(documents, folder, split, length, 2)
    index = {"sequence_length": length, "vocabulary_size": vocabulary, "splits": sizes}
    (folder / "index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="session")
def tiny_student(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize_folder(tiny_model, tmp_path_factory.mktemp("tiny-student"))


@pytest.fixture(scope="session")
def tiny_sequences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_sequences(tmp_path_factory.mktemp("tiny-sequences"), 320)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
