"""The stage through its command line, on a tiny pair, with some items answered before."""

import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from components.chats.rows import read_rows, write_rows
from components.contract.context import Input, Inputs, Output
from components.contract.digest import stage_digest
from components.contract.errors import UserError
from components.contract.log import Log
from components.measure.ledger import Ledger
from components.measure.stage import VERSION, Answers, Config, Quality, Regime, run
from components.serving.profiles import CPU
from components.store.artifact import commit, read_manifest
from components.store.backend import Store
from components.store.work import Work

PROFILE = CPU.model_copy(update={"dtype": "float32", "max_model_len": 512})


def test_a_regime_that_does_not_fit_is_named():
    with pytest.raises(
        ValidationError, match=r"latency\.long: input and output tokens exceed profile\.max_model_len 512"
    ):
        Config(profile=PROFILE, latency={"long": Regime(input_tokens=500, output_tokens=13)})
    Config(profile=PROFILE, latency={"long": Regime(input_tokens=500, output_tokens=12)})


def put(store: Store, stage: str, folder: Path) -> str:
    digest = hashlib.sha256(stage.encode()).hexdigest()
    return commit(store, stage, digest, folder, {"version": 1, "metrics": {}, "config": {}, "inputs": {}})[0].uri


@pytest.fixture
def command(tmp_path, tiny_model, tiny_draft):
    """Return the stage's argv and the digest it commits under."""
    store = Store(str(tmp_path / "store"))
    bundle = tmp_path / "bundle"
    for source, target in ((tiny_model, bundle), (tiny_draft, bundle / "draft")):
        target.mkdir()
        for path in source.iterdir():
            os.link(path, target / path.name)
    chats, prompts = tmp_path / "chats", tmp_path / "prompts"
    for folder in (chats, prompts):
        folder.mkdir()
    questions = [f"What is {n} plus a cat?" for n in range(8)]
    write_rows(
        prompts / "part-0.jsonl",
        [
            {"id": str(n), "category": "cats", "conversations": [{"role": "user", "content": question}]}
            for n, question in enumerate(questions)
        ],
    )
    write_rows(chats / "part-0.jsonl", [{"id": "x", "prompt_token_ids": [5, 6], "token_ids": [7, 8, 9, 7, 8]}])
    uris = {
        "model": put(store, "bundle", bundle),
        "prompts": put(store, "prompts", prompts),
        "chats": put(store, "regen", chats),
    }
    config = Config(
        draft=True,
        profile=PROFILE,
        answers=Answers(prompts=8, max_tokens=16, concurrent_prompts=4, concurrency=2),
        latency={"short": Regime(input_tokens=32, output_tokens=8, warmups=1, samples=40)},
    )
    inputs = Inputs({port: [Input(uri)] for port, uri in uris.items()})
    digest = stage_digest("measure", VERSION, config, inputs.digests())
    argv = [sys.executable, "-m", "components.measure", "--config", config.model_dump_json()]
    for port, uri in uris.items():
        argv += ["--input", f"{port}={uri}"]
    return [*argv, "--output", store.uri(f"measure/{digest}")], store, digest


def test_missing_items_are_named_before_a_server_starts(tmp_path):
    output = Output(tmp_path, tmp_path, Work(Store(str(tmp_path / "store")), "_work"), Log("test", io.StringIO()))
    model = tmp_path / "model.gguf"
    model.touch()
    with pytest.raises(UserError, match=r"no file called gpqa\.jsonl"):
        run(Config(quality={"gpqa": Quality()}), Inputs({"model": [Input(str(model))]}), output)
    assert not (tmp_path / "server.log").exists()


@pytest.mark.slow
def test_a_measurement_does_not_ask_answered_items_again(command, tmp_path):
    """What a kill leaves is a ledger; ``test_bench.py`` kills one at work, here two items are answered before."""
    argv, store, digest = command
    environment = {**os.environ, "QDFLASH_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    output = Output(tmp_path, tmp_path, Work(store, f"_work/measure/{digest}"), Log("test", io.StringIO()))
    told = {"token_ids": [5], "top": [[[5, -0.1], [6, -3.0]]], "text": "told before", "finish_reason": "length"}
    timed = {"seconds": 7.0, "first": 1.0, "tokens": 8}
    Ledger(output, 2).item("answer/3", lambda: {**told, "seconds": 7.0, "drafts": 1, "accepted": [1, 0, 0]})
    Ledger(output, 2).item("latency/short/5", lambda: timed)

    finished = subprocess.run(argv, env=environment, stderr=subprocess.PIPE, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr
    artifact = read_manifest(store, "measure", digest)
    folder = Input(artifact.uri).path
    samples = list(read_rows(folder))
    assert len(samples) == 12
    assert [sample["id"] for sample in samples if sample["text"] == "told before"] == ["3"]
    assert timed in json.loads((folder / "latency.json").read_text())["short"]["samples"]

    metrics = artifact.metrics
    assert metrics["acceptance_length"]["n"] == 8
    assert metrics["acceptance_length"]["bigram"]["value"] >= 1
    assert metrics["latency"]["short"]["n"] == 40
    assert metrics["server_start_seconds"] > 0
    assert {"samples.jsonl", "acceptance.json", "latency.json"} <= {entry["path"] for entry in artifact.files}
