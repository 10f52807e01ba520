"""``qdflash bench`` as people call it, against the session's real server, and its samples against transformers'."""

import json
import os
import subprocess
import time
from http.server import SimpleHTTPRequestHandler

import numpy as np
import pytest

from components.contract.errors import TransientError, UserError
from components.measure import published, sampling
from components.measure.answers import ask_sampled, settled
from components.measure.bench import run
from components.measure.endpoint import connect
from components.measure.job import Job
from components.measure.stage import Config, Regime
from pipelines.interpreters import interpreter
from tests.loopback import Handler, serving

pytestmark = pytest.mark.slow
QUESTIONS = ["Name a cat.", "Name a dog.", "What is a prime number?", "What is the capital of France?"]


@pytest.fixture
def bench(tmp_path):
    """Run ``qdflash bench`` on files of this test's own; return its exit code, its JSON and what it says."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"conversations": [{"role": "user", "content": question}]} for question in QUESTIONS]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*words, **environment):
        argv = [interpreter("core"), "-m", "pipelines.cli", "bench", *words]
        argv += ["--prompts", str(prompts)] if words[0] in ("parity", "acceptance") else []
        done = subprocess.run(
            argv,
            env={**os.environ, "QDFLASH_HOME": str(tmp_path / "home"), **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, json.loads(done.stdout) if done.stdout[:1] == "{" else done.stdout, done.stderr

    return run


def test_two_servers_are_timed_in_turn_and_their_ratio_has_an_interval(bench, server, tmp_path):
    words = ("--regime", "a=40/12", "--regime", "b=80/6", "--warmups", "1", "--samples", "3")
    sweep = ("--concurrency", "1", "--concurrency", "4")
    code, result, said = bench("latency", server.url, server.url, *words, *sweep, "--json", "-o", str(tmp_path / "o"))
    assert code == 0, said
    assert set(result["figures"][0]) == {"a", "b", "a@4", "b@4"}
    for side in result["figures"]:
        for figures in side.values():
            assert (figures["n"], figures["failed"]) == (3, 0)
            assert 0 < figures["ttft_ms"] < figures["median_ms"] <= figures["p95_ms"]
        assert side["a"]["tokens"] == 12
        assert side["a@4"]["tokens_per_second"] > 0
    speedup = result["comparison"]["speedup"]
    medians = [side["a"]["median_ms"] for side in result["figures"]]
    assert speedup["regimes"]["a"]["value"] == pytest.approx(medians[1] / medians[0])
    assert speedup["regimes"]["a"]["low"] <= speedup["regimes"]["a"]["value"] <= speedup["regimes"]["a"]["high"]
    assert speedup["mean"]["value"] == pytest.approx(np.mean([speedup["regimes"][name]["value"] for name in "ab"]))
    assert json.loads((tmp_path / "o" / "result.json").read_text()) == result
    assert len(json.loads((tmp_path / "o" / "baseline" / "latency.json").read_text())["a"]["samples"]) == 3
    assert not list((tmp_path / "home" / "bench").rglob("*.json")), "finished work is left behind"


def test_a_killed_measurement_asks_only_what_is_not_answered_yet(bench, server, tmp_path):
    words = ("latency", server.url, "--regime", "a=16/6", "--warmups", "2", "--samples", "40", "--json")
    environment = {**os.environ, "QDFLASH_HOME": str(tmp_path / "home")}
    argv = [interpreter("core"), "-m", "pipelines.cli", "bench", *words]
    before = server.client.metrics().generation_tokens
    killed = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(answered := list((tmp_path / "home" / "bench").rglob("items/*.json"))) < 5:
        assert killed.poll() is None, "it ended before it could be killed"
    killed.kill()
    killed.wait()
    while not server.client.is_idle() or len(answered) != len(list((tmp_path / "home").rglob("items/*.json"))):
        answered = list((tmp_path / "home").rglob("items/*.json"))
        time.sleep(0.3)
    between = server.client.metrics().generation_tokens
    assert between - before < 42 * 6
    code, result, said = bench(*words)
    assert code == 0, said
    assert result["figures"][0]["a"]["n"] == 40
    settled(server.client, between + 6 * (42 - len(answered)))


def test_natural_answers_through_invocations_and_a_table(bench, server):
    words = ("--regime", "a=20/30", "--warmups", "0", "--samples", "2", "--natural", "--invocations")
    code, table, said = bench("latency", server.url, *words)
    assert code == 0, said
    assert "ms a token" in table
    assert table.splitlines()[2].split()[-2:] == ["2", "0"]


def test_acceptance_is_the_servers_own_count(bench, server):
    before = server.client.metrics()
    code, result, said = bench("acceptance", server.url, "--count", "3", "--max-tokens", "24", "--json")
    assert code == 0, said
    (figures,) = result["figures"]
    counted = server.client.metrics() - before
    assert figures["value"] == pytest.approx(counted.acceptance_length)
    assert (figures["n"], figures["drafts"]) == (3, counted.drafts)


def test_the_published_protocol_in_one_command(bench, server, tmp_path):
    folder = tmp_path / "data" / "acceptance"
    folder.mkdir(parents=True)
    for name, row in (
        ("gsm8k", {"question": "{} cats and a dog?"}),
        ("humaneval", {"prompt": "def f{}():"}),
        ("longbench_v2", {"context": "A cat sits on a text. " * 3, "question": "What is text {}?"}),
    ):
        rows = [{key: text.replace("{}", str(number)) for key, text in row.items()} for number in range(3)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("acceptance", server.url, "--published", "--data", str(folder.parent))
    code, result, said = bench(*words, "--max-tokens", "8", "--json")
    assert code == 0, said
    (figures,) = result["figures"]
    assert {kind: one["n"] for kind, one in figures["by_kind"].items()} == dict.fromkeys(published.QUESTIONS, 3)
    assert (result["config"]["config"]["answers"]["prompts"], result["config"]["config"]["template"]["thinking"]) == (
        192,
        False,
    )
    (folder / "longbench_v2.jsonl").write_text(json.dumps({"context": "A cat. " * 500, "question": "Why?"}) + "\n")
    code, _, said = bench(*words, "--max-tokens", "8")
    assert (code, "6 of 7 published prompts and 8 tokens fit into the server's 512" in said) == (2, True), said
    (folder / "gsm8k.jsonl").unlink()
    code, _, said = bench(*words)
    assert (code, "gsm8k.jsonl: missing; qdflash bench prefetch --suite acceptance stores it" in said) == (2, True)


def test_parity_with_itself_holds(bench, server, tiny_model):
    words = ("--count", "6", "--max-tokens", "8", "--long", "60", "--concurrency", "3", "--draws", "8", "--exact")
    code, result, said = bench("parity", server.url, server.url, *words, "--tokenizer", str(tiny_model), "--json")
    assert code == 0, said
    greedy = result["comparison"]["greedy"]
    assert greedy["passed"]
    assert greedy["equal"] == greedy["compared"] == 12
    assert greedy["logprobs"]["max_gap"] < 1e-3
    for figures in result["figures"]:
        assert figures["alone_and_together"]["passed"]
        assert figures["repeated"]["greedy"] == figures["repeated"]["seeded"] == {"compared": 4, "equal": 4}
    for name in sampling.SETTINGS:
        assert result["comparison"]["sampled"]["tests"][name]["draws"] == 6 * 16


@pytest.fixture
def web():
    """A server that serves no model."""
    with serving(SimpleHTTPRequestHandler) as (_, url):
        yield url


class Plain(Handler):
    """The OpenAI API without vLLM's additions: no token ids, no /tokenize, no /metrics. Every third answer fails."""

    answers, prompts = 0, []

    def do_GET(self):
        known = {"/v1/models": {"data": [{"id": "plain"}]}, "/health": {}}
        self.reply(200 if self.path in known else 404, json.dumps(known.get(self.path, {})))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Plain.answers += self.path == "/v1/completions"
        if self.path != "/v1/completions" or Plain.answers % 3 == 0:
            self.reply(500, json.dumps({"error": {"message": "busy"}}))
            return
        Plain.prompts.append(body["prompt"])
        count = body["max_tokens"]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        events = [{"choices": [{"text": "x", "finish_reason": None}]}] * count
        events += [{"choices": [{"text": "", "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
        self.reply(200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")


def test_a_server_without_vllms_additions_is_timed_and_its_failures_count(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    regime = Regime(input_tokens=20, output_tokens=4, warmups=0, samples=9)
    asked = {"config": Config(latency={"one": regime}), "tokenizer": tiny_model}
    with serving(Plain) as (_, url):
        result = run(Job(kind="latency", urls=(url,), **asked), tmp_path / "out", tmp_path / "scratch")
        (figures,) = result["figures"]
        assert (figures["one"]["n"], figures["one"]["failed"], figures["one"]["tokens"]) == (6, 3, 4)
        texts = tmp_path / "texts.jsonl"
        documents = [f"{number} " + "A cat sits on a long text. " * number for number in range(20)]
        texts.write_text("".join(json.dumps({"context": text}) + "\n" for text in documents))
        sliced = Job(kind="latency", urls=(url,), texts=texts, **asked)
        Plain.prompts.clear()
        assert run(sliced, tmp_path / "out", tmp_path / "scratch")["figures"][0]["one"]["n"] == 6
        tokenizer = connect(url, None, tiny_model, False).tokenizer
        for prompt in Plain.prompts:
            assert any(text.startswith(tokenizer.decode(prompt)) for text in documents)
        assert len(set(map(tuple, Plain.prompts))) == 6
        texts.write_text("".join(json.dumps({"context": text}) + "\n" for text in [*documents[:9], documents[8]]))
        with pytest.raises(UserError, match="8 of the texts have 20 tokens of their own; 9 are needed"):
            run(sliced, tmp_path / "out", tmp_path / "scratch")
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"conversations": [{"role": "user", "content": "Hello"}]}\n')
        with pytest.raises(UserError, match="/metrics: not vLLM's"):
            run(Job(kind="acceptance", urls=(url,), prompts=prompts, **asked), tmp_path / "out", tmp_path / "scratch")
        with pytest.raises(UserError, match="--tokenizer FOLDER"):
            connect(url, None, None, False)


def test_what_cannot_be_measured_is_refused_in_one_line(bench, server, web, tmp_path):
    code, out, said = bench("latency", server.url, "--regime", "long=500/13")
    assert (code, out) == (2, "")
    assert said.startswith("qdflash: latency.long: 500 and 13 tokens exceed the server's 512;")
    assert len(said.splitlines()) == 1
    code, _, said = bench("quality", server.url, "--data", str(tmp_path), "--suite", "gpqa")
    assert (code, "gpqa.jsonl: missing; qdflash bench prefetch --suite gpqa" in said) == (2, True)
    with pytest.raises(TransientError, match="no answer from the server"):
        connect("http://127.0.0.1:9", None, None, False)
    for url, model, folder, phrase in (
        ("ftp://127.0.0.1", None, None, "not a URL"),
        (server.url.replace("//", "//name:password@"), None, None, "holds credentials"),
        (web, None, None, "no OpenAI-compatible server"),
        (server.url, "gpt", None, "serves qdflash, not gpt"),
        (server.url, None, tmp_path, "no tokenizer.json"),
    ):
        with pytest.raises(UserError, match=phrase):
            connect(url, model, folder, False)


def test_samples_under_a_drafter_are_those_of_transformers(server, tiny_model):
    """transformers computes the model and draws from it; no speculation and no code of vLLM's or ours is in that."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompts = [{"id": str(n), "prompt_token_ids": [5 + n, 17, 42 * n, 99, 7]} for n in range(4)]
    draws, tokens = 48, 6

    def reference(settings):
        torch.manual_seed(0)
        rows = []
        for prompt in prompts:
            ids = torch.tensor([prompt["prompt_token_ids"]])
            drawn = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                num_return_sequences=draws,
                min_new_tokens=0,
                max_new_tokens=tokens,
                eos_token_id=None,
                pad_token_id=0,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
            )
            rows.append(drawn[:, ids.shape[1] :].numpy())
        return rows

    asked = {
        name: [
            np.array(ask_sampled(server.client, prompt, draws, tokens, settings, name)["token_ids"])
            for prompt in prompts
        ]
        for name, settings in sampling.SETTINGS.items()
    }
    for name, settings in sampling.SETTINGS.items():
        found = sampling.compare(asked[name], reference(settings), seed=0)
        assert found["passed"], (name, found)
        assert found["power"]["0.2"] > 0.8
    first, second = asked
    assert not sampling.compare(asked[first], reference(sampling.SETTINGS[second]), seed=0)["passed"]
