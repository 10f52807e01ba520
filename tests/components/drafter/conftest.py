import json
import random
from pathlib import Path

import pytest
import torch

PHRASES = 12


def write_chats(folder: Path, count: int, phrase: int = 24, seed: int = 0) -> Path:
    """Rows whose answers repeat one of a few fixed sequences of token ids, so that a drafter can learn them."""
    draw = random.Random(seed)
    phrases = [[draw.randrange(4, 320) for _ in range(phrase)] for _ in range(PHRASES)]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "part-0.jsonl").open("w") as lines:
        for index in range(count):
            row = {
                "id": f"row-{index}",
                "prompt_token_ids": [1, *(draw.randrange(4, 320) for _ in range(draw.randrange(3, 9)))],
                "token_ids": [*draw.choice(phrases)[draw.randrange(8) :], 2],
                "finish_reason": "stop",
            }
            lines.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats"), 60)


@pytest.fixture(scope="session")
def target(tiny_model: Path) -> torch.nn.Module:
    from components.checkpoint.load import load_model

    return load_model(tiny_model, torch.float32)


@pytest.fixture
def drafter(target: torch.nn.Module) -> torch.nn.Module:
    from components.drafter import model

    torch.manual_seed(0)
    built = model.build(target.config, layers=2, taps=[0, 2], block_size=4, mask_token=3)
    return model.attach(built, target)
