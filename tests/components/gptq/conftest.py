from pathlib import Path

import pytest
import torch

from tests.components.drafter.conftest import write_chats

DRAFT_TOKENS = torch.arange(2, 320, 2)


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("gptq-chats"), 40)


@pytest.fixture(scope="session")
def target(tiny_model: Path) -> torch.nn.Module:
    from components.checkpoint.load import load_model

    return load_model(tiny_model, torch.float32)


def save_drafter(
    target: torch.nn.Module, folder: Path, draft_tokens: torch.Tensor | None = None, layers: int = 2
) -> Path:
    """A random drafter whose head knows only some tokens, or all."""
    from components.drafter import model

    torch.manual_seed(0)
    built = model.build(
        target.config, layers=layers, taps=[0, 2], block_size=4, mask_token=3, window=32, draft_tokens=draft_tokens
    )
    model.save(model.attach(built, target), folder)
    return folder


@pytest.fixture(scope="session")
def drafter_folder(target: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_drafter(target, tmp_path_factory.mktemp("drafter"))


@pytest.fixture
def drafter(target: torch.nn.Module, drafter_folder: Path) -> torch.nn.Module:
    from components.drafter import model

    loaded = model.attach(model.read(drafter_folder), target)
    model.load_weights(loaded, drafter_folder)
    return loaded
