"""The real stage on a real model: killed while it works, continued, and read back."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers.decoders import DecodeStream

from components.chats.rows import read_rows
from components.chats.template import Template, prompt_token_ids
from components.contract.context import Input
from components.contract.digest import stage_digest
from components.model.folder import set_chat_template
from components.regen import stage
from components.regen.answers import row_seed
from components.store.artifact import commit
from components.store.backend import Store
from components.store.work import Work

pytestmark = pytest.mark.slow
COUNT = 48
CONFIG = stage.Config(max_tokens=160, dtype="float32", max_model_len=512, parallel=4, shard_rows=4)


class Call:
    """One ``python -m components.regen`` on a store in ``folder``."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.store, self.log = Store(str(folder / "store")), folder / "log"
        source = folder / "prompts"
        source.mkdir()
        rows = [
            {"id": f"row-{n}", "category": "chat", "conversations": [{"role": "user", "content": f"Count to {n}"}]}
            for n in range(COUNT)
        ]
        (source / "part-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        prompts = self._commit("prompts", "1" * 64, source)
        teacher = self._commit("model", "2" * 64, model)
        digests = {"prompts": ["1" * 64], "model": ["2" * 64]}
        self.digest = stage_digest("regen", stage.VERSION, CONFIG, digests)
        self.uri = self.store.uri(f"regen/{self.digest}")
        self.work = Work(self.store, f"_work/regen/{self.digest}")
        self.argv = [sys.executable, "-m", "components.regen", "--config", CONFIG.model_dump_json()]
        self.argv += ["--input", f"prompts={prompts}", "--input", f"model={teacher}", "--output", self.uri]
        root = str(Path(__file__).parents[3])
        self.environment = {**os.environ, "QDFLASH_HOME": str(folder / "home"), "PYTHONPATH": root}

    def start(self, **runtime: int) -> subprocess.Popen:
        config = CONFIG.model_copy(update=runtime).model_dump_json()
        argv = [config if word == CONFIG.model_dump_json() else word for word in self.argv]
        with self.log.open("w") as log:
            return subprocess.Popen(argv, stderr=log, env=self.environment)

    def _commit(self, made_by: str, digest: str, source: Path) -> str:
        manifest = {"version": 1, "config": {}, "inputs": {}, "salt": None, "metrics": {}, "versions": {}}
        return commit(self.store, made_by, digest, source, manifest)[0].uri


def descendants(pid: int) -> list[int]:
    """Return every process below ``pid``."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(below for child in children for below in descendants(child))]


def in_steps(tokenizer: Any, token_ids: list[int]) -> str:
    """Decode as vLLM does, a token at a time; the bytes of a character that is not whole are held back."""
    stream = DecodeStream(skip_special_tokens=True)
    return "".join(stream.step(tokenizer.backend_tokenizer, token) or "" for token in token_ids)


def test_killed_run_continues_without_redoing_committed_rows(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    call = Call(tmp_path, tiny_model)
    first = call.start()
    while not call.work.names("rows/"):
        assert first.poll() is None, call.log.read_text()[-2000:]
        time.sleep(0.05)
    engine = descendants(first.pid)
    assert engine
    first.kill()
    first.wait()
    deadline = time.monotonic() + 30
    while any(Path("/proc", str(pid), "exe").exists() for pid in engine) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert [pid for pid in engine if Path("/proc", str(pid), "exe").exists()] == []
    kept = {name: call.work.get(name) for name in call.work.names("rows/")}
    done = sum(shard.count(b"\n") + 1 for shard in kept.values())
    assert 0 < done < COUNT

    second = call.start(replicas=2)  # a runtime field: the same digest
    assert second.wait(timeout=900) == 0, call.log.read_text()[-2000:]
    log = call.log.read_text()
    assert f"progress done={done} total={COUNT}" in log
    folder = Input(call.uri).path
    parts = [path.read_bytes().rstrip(b"\n") for path in sorted(folder.glob("part-*.jsonl"))]
    assert parts[: len(kept)] == list(kept.values())
    rows = list(read_rows(folder))
    assert sorted(row["id"] for row in rows) == sorted(f"row-{n}" for n in range(COUNT))

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for row in rows:
        assert row["prompt_token_ids"] == prompt_token_ids(tokenizer, row["conversations"], Template())
        assert row["seed"] == row_seed(row["id"], 0)
        assert row["model"] == "2" * 64
        ended = row["token_ids"][-1] == tokenizer.eos_token_id
        assert row["finish_reason"] == ("stop" if ended else "length")
        assert ended or len(row["token_ids"]) == CONFIG.max_tokens
        assert row["text"] == in_steps(tokenizer, row["token_ids"])

    third = call.start()
    assert third.wait(timeout=60) == 0
    assert "cached" in call.log.read_text()


def test_prompts_that_the_chat_endpoint_would_make_otherwise_end_the_stage(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    set_chat_template(
        model, "{% for one in messages %}{% for part in one.content %}{{ part.text or part }} {% endfor %}{% endfor %}"
    )
    call = Call(tmp_path, model)
    assert call.start().wait(timeout=600) == 1
    line = call.log.read_text().strip().splitlines()[-1]
    assert "regen failed" in line
    said = r"chat template: from token \d on a prompt is 'C o u n t .*' here and 'Count to 0 ' at vLLM's chat endpoint"
    assert re.search(said, line)
    assert call.work.names("rows/") == []
