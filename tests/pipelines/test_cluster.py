"""Where a recipe's images come from."""

from pathlib import Path

import pytest

from components.contract.errors import UserError
from pipelines import cluster
from pipelines.recipe import load_recipe
from tests.pipelines.planning import TINY


def image(role: str, letter: str) -> str:
    return f"registry.example/qdflash-{role}@sha256:{letter * 64}"


def test_images_default_to_the_lock_and_the_recipe_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LOCK", tmp_path / "lock.yaml")
    with pytest.raises(UserError, match=r"cluster\.images\.core: not given"):
        load_recipe(TINY).cluster.image("core")
    (tmp_path / "lock.yaml").write_text(f"core: {image('core', 'a')}\ntrain: {image('train', 'a')}\n")
    chosen = load_recipe(TINY, [f"cluster.images.train={image('train', 'b')}"]).cluster
    assert chosen.image("core") == image("core", "a")
    assert chosen.image("train") == image("train", "b")
    with pytest.raises(UserError, match=r"cluster\.images\.vllm: not given"):
        chosen.image("vllm")


@pytest.mark.parametrize("text", ["core: registry.example/qdflash-core:latest", "gpu: x", "core: [", "- core"])
def test_a_lock_that_pins_nothing_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LOCK", tmp_path / "lock.yaml")
    (tmp_path / "lock.yaml").write_text(text)
    with pytest.raises(UserError, match=r"lock\.yaml: not as qdflash images lock writes it"):
        load_recipe(TINY)
