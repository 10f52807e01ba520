"""A bundle of an attacker's making in vLLM's own hands: none of its code runs, in any place that could."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.serving.start import ALWAYS

pytestmark = pytest.mark.slow


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What the attacker's code would leave behind."""
    return tmp_path / "owned"


@pytest.fixture
def poisoned(tiny_model: Path, tmp_path: Path, mark: Path) -> Path:
    """A model folder whose config names classes of its own for config, model and tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: ...\n")
    for name in ("config.json", "tokenizer_config.json"):
        about = json.loads((folder / name).read_text())
        about["auto_map"] = {
            "AutoConfig": "evil.Evil",
            "AutoModelForCausalLM": "evil.Evil",
            "AutoTokenizer": ["evil.Evil", "evil.Evil"],
        }
        (folder / name).write_text(json.dumps(about))
    return folder


class Pickled:
    """Unpickles to a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("model_type", ["qwen3", "evil"])
def test_code_that_a_config_names_is_not_run(poisoned: Path, mark: Path, model_type: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    about = json.loads((poisoned / "config.json").read_text())
    (poisoned / "config.json").write_text(json.dumps({**about, "model_type": model_type}))
    made = EngineArgs(model=str(poisoned), tokenizer=str(poisoned), load_format=ALWAYS[1])
    if model_type == "qwen3":
        assert made.create_model_config().trust_remote_code is False
    else:
        with pytest.raises(ValueError, match=r"trust_remote_code|Transformers does not recognize"):
            made.create_model_config()
    assert not mark.exists()


def test_a_tokenizer_s_code_is_not_run(poisoned: Path, mark: Path) -> None:
    from vllm.tokenizers import get_tokenizer

    assert get_tokenizer(str(poisoned), trust_remote_code=False).vocab_size > 0
    assert not mark.exists()


def test_pickled_weights_are_not_opened(poisoned: Path, mark: Path) -> None:
    """What vLLM would unpickle of its own accord where no safetensors lie; --load-format leaves them alone."""
    import torch
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    (poisoned / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Pickled(mark)}, poisoned / "pytorch_model.bin")
    source = SimpleNamespace(model_or_path=str(poisoned), subfolder=None, revision=None, fall_back_to_pt=True)
    where = (source.model_or_path, source.subfolder, source.revision, source.fall_back_to_pt, None)
    _, found, _, _ = DefaultModelLoader(LoadConfig(load_format="auto"))._prepare_weights(*where)
    assert [Path(one).name for one in found] == ["pytorch_model.bin"]
    with pytest.raises(RuntimeError, match="Cannot find any model weights"):
        DefaultModelLoader(LoadConfig(load_format=ALWAYS[1]))._prepare_weights(*where)
    assert not mark.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{% set _ = messages.append({'role': 'system', 'content': 'obey'}) %}{{ messages }}",
    ],
)
def test_a_chat_template_is_rendered_in_a_sandbox(poisoned: Path, mark: Path, template: str) -> None:
    from jinja2.exceptions import SecurityError
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(str(poisoned), trust_remote_code=False)
    with pytest.raises(SecurityError):
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], chat_template=template.replace("MARK", str(mark)), tokenize=False
        )
    assert not mark.exists()
