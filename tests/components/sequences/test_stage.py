import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from components.chats.rows import is_held_out, write_rows
from components.contract.context import Input, Inputs, Output
from components.contract.errors import UserError
from components.contract.log import Log
from components.sequences import stage
from components.sequences.reader import read_split
from components.store.artifact import commit
from components.store.backend import Store
from components.store.work import Work
from tests.components.tiny_models import build

EOS = 2


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the stage on rows and the tiny model, or another; return its metrics and its folder."""
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    store = Store(str(tmp_path / "store"))
    manifest = {"version": 1, "config": {}, "inputs": {}, "salt": None, "metrics": {}, "versions": {}}

    def call(rows: list[dict], model: Path = tiny_model, **config: object) -> tuple[dict, Path]:
        source = tmp_path / "chats"
        source.mkdir()
        write_rows(source / "part-00000.jsonl", rows[: len(rows) // 2])
        write_rows(source / "part-00001.jsonl", rows[len(rows) // 2 :])
        chats = commit(store, "regen", "1" * 64, source, manifest)[0].uri
        teacher = commit(store, "model", "2" * 64, model, manifest)[0].uri
        out, scratch = tmp_path / "out", tmp_path / "scratch"
        out.mkdir()
        scratch.mkdir()
        output = Output(out, scratch, Work(store, "_work/sequences/x"), Log("sequences"))
        inputs = Inputs({"chats": [Input(chats)], "model": [Input(teacher)]})
        return stage.run(stage.Config.model_validate(config), inputs, output), out

    return call


def row(number: int, reason: str = "stop") -> dict:
    generator = np.random.default_rng(number)
    prompt, answer = (generator.integers(4, 300, generator.integers(2, 40)).tolist() for _ in range(2))
    ids = {"prompt_token_ids": prompt, "token_ids": answer + [EOS] * (number % 2)}
    return {"id": f"row-{number}", "finish_reason": reason, **ids}


def test_rows_are_split_before_packing_and_joined_by_separators(run) -> None:
    rows = [row(number, "length" if number % 7 == 0 else "stop") for number in range(60)]
    metrics, folder = run(rows, sequence_length=32, held_out=0.2)
    assert metrics["dropped_truncated"] == 9
    for split in ("train", "val"):
        packed = read_split(folder, split)
        expected = {}
        for one in rows:
            if one["finish_reason"] == "stop" and is_held_out(one["id"], 0.2) == (split == "val"):
                ended = one["token_ids"][-1:] == [EOS]
                expected[one["id"]] = one["prompt_token_ids"] + one["token_ids"] + [EOS] * (not ended)
        flat = packed.ids.reshape(-1).tolist()
        total = sum(map(len, expected.values()))
        bounds = [*packed.starts.tolist(), total]
        documents = [flat[start:end] for start, end in itertools.pairwise(bounds)]
        assert sorted(documents) == sorted(expected.values())
        assert all(one[-1] == EOS for one in documents)
        assert flat[total:] == [EOS] * (len(flat) - total)
        assert len(flat) - total < 32
        assert packed.ids.dtype == np.int32
        assert isinstance(packed.ids, np.memmap)


def test_rows_that_come_as_text_pack_like_the_ids_they_become(run, tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = []
    for number in range(40):
        thought = {"role": "assistant", "content": f"<think>\nhm\n</think>\n\nIt is {number}."}
        turns = [{"role": "user", "content": f"What is {number}?"}, thought]
        rows.append({"id": f"row-{number}", "category": "chat", "conversations": turns})
    metrics, folder = run(rows, sequence_length=64, held_out=0.2, template={"thinking": True}, count="answer")
    assert metrics["train_documents"] + metrics["val_documents"] == 40
    split = read_split(folder, "train")
    flat, mask = split.ids.reshape(-1), split.mask.reshape(-1)
    bounds = [*split.starts.tolist(), metrics["train_tokens"]]
    for start, end in itertools.pairwise(bounds):
        text = tokenizer.decode(flat[start:end])
        number = text.partition("What is ")[2].partition("?")[0]
        prompt = f"<|im_start|>user\nWhat is {number}?<|im_end|>\n<|im_start|>assistant\n<think>\n"
        assert text == f"{prompt}hm\n</think>\n\nIt is {number}.<|im_end|>"
        first = start + len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        assert all(mask[at] == (at >= first and at % 64 > 0) for at in range(start, end))


def test_an_unfinished_answer_as_text_is_dropped_or_refused_but_never_ended(run, tmp_path: Path, tiny_model: Path):
    from transformers import AutoTokenizer

    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "CUT SHORT because"}]
    cut = {"id": "cut", "finish_reason": "length", "conversations": turns}
    rows = [*(row(number) for number in range(20)), cut, *(row(number) for number in range(20, 40))]
    metrics, folder = run(rows, sequence_length=64, held_out=0.2, truncated="drop")
    assert metrics["dropped_truncated"] == 1
    assert metrics["train_documents"] + metrics["val_documents"] == 40
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert not any(
        "CUT SHORT" in tokenizer.decode(read_split(folder, split).ids.reshape(-1)) for split in ("train", "val")
    )
    for name in ("chats", "out", "scratch"):
        shutil.rmtree(tmp_path / name)
    with pytest.raises(UserError, match=r"row cut: an unfinished answer .* truncated: drop"):
        run(rows, sequence_length=64, held_out=0.2, truncated="keep")


def test_an_empty_split_is_refused(run) -> None:
    with pytest.raises(UserError, match="the val split has no rows"):
        run([row(number) for number in range(3)], sequence_length=64, held_out=1e-9)


def test_reset_is_refused_for_models_with_recurrent_layers(run, tmp_path: Path, tiny_model: Path) -> None:
    hybrid = build("qwen3_5", tmp_path / "hybrid")
    for path in tiny_model.glob("token*"):
        (hybrid / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match="linear_attention layers"):
        run([row(number) for number in range(40)], hybrid, boundaries="reset")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_reset_positions_give_each_document_the_states_it_has_alone(run, tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    rows = [row(number) for number in range(40)]
    folder = run(rows, boundaries="reset", sequence_length=64, held_out=0.2)[1]
    split = read_split(folder, "train")
    model = AutoModelForCausalLM.from_pretrained(build(kind, tmp_path / kind), dtype=torch.float64)
    for index in range(2):
        ids, positions = torch.from_numpy(split.ids[index].astype("int64")), torch.from_numpy(split.positions(index))
        states = model.base_model(ids[None], position_ids=positions[None], use_cache=False).last_hidden_state[0]
        starts = [at for at in range(64) if positions[at] == 0]
        assert len(starts) > 1
        for start, end in zip(starts, [*starts[1:], 64], strict=True):
            alone = model.base_model(ids[None, start:end], use_cache=False).last_hidden_state[0]
            assert torch.allclose(states[start:end], alone, atol=1e-9)
    leaked = model.base_model(ids[None], use_cache=False).last_hidden_state[0]
    assert not torch.allclose(leaked, states, atol=1e-3)


MEMORY = """
import json, resource, sys
import numpy as np
from pathlib import Path
from components.sequences.packing import Documents, document, pack

folder, rows = Path(sys.argv[1]), int(sys.argv[2])
documents = Documents(folder, "train", 0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for number in range(rows):
    row = {"id": str(number), "prompt_token_ids": [1] * 1000, "token_ids": [2] * 1000, "finish_reason": "stop"}
    documents.append(document(row, 9, 10, "all"))
pack(documents.shuffled(), folder, "train", 4096, 9)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tokens(tmp_path: Path) -> None:
    rows = 20_000  # 40 million tokens, 200 MB of ids and masks
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), str(rows)], capture_output=True, text=True, cwd=root, check=True
    )
    assert int(done.stdout) < 20_000  # KiB
    assert (tmp_path / "train.bin").stat().st_size >= rows * 2000 * 4


def test_sequences_longer_than_the_model_knows_positions_are_refused(run) -> None:
    with pytest.raises(UserError, match=r"sequence_length 2048: .* knows 1024 positions"):
        run([row(number) for number in range(20)], sequence_length=2048, held_out=0.2)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("5", r":21: not a JSON row \(no JSON object\)"),
        ('{"id": "a", "prom', r":21: not a JSON row"),
        ('{"id": "a", "conversations": "\\ud83d"}', r":21: not a JSON row \(.*surrogates not allowed"),
        ('{"prompt_token_ids": [4], "token_ids": [4], "finish_reason": "stop"}', "row None: id, prompt_token_ids"),
        ('{"id": 7, "prompt_token_ids": [4], "token_ids": [4], "finish_reason": "stop"}', "row 7: .*an id is a text"),
    ],
)
def test_a_line_that_is_no_row_is_named(tiny_model: Path, tmp_path: Path, line: str, says: str) -> None:
    chats = tmp_path / "chats.jsonl"
    write_rows(chats, [row(number) for number in range(20)])
    chats.write_text(chats.read_text() + line + "\n")
    output = Output(tmp_path, tmp_path, Work(Store(str(tmp_path / "store")), "_work/sequences/x"), Log("sequences"))
    model = Input(str(tiny_model))
    model.__dict__["path"] = tiny_model
    with pytest.raises(UserError, match=says):
        stage.run(stage.Config(sequence_length=32), Inputs({"chats": [Input(str(chats))], "model": [model]}), output)
