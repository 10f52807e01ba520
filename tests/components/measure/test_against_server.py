"""The suites against a real vLLM server that drafts: the session's shared one."""

import io
import json
import random
import threading
from dataclasses import replace

import pytest

from components.chats.template import Template, prompt_token_ids
from components.contract.context import Output
from components.contract.errors import StageError, TransientError, UserError
from components.contract.log import Log
from components.measure import answers, exam, latency, parity, sampling, suites
from components.measure.ledger import Ledger
from components.measure.stage import Answers, Config, Quality, Regime, Sampled
from components.serving.client import Client
from components.serving.profiles import CPU
from components.store.backend import Store
from components.store.work import Work

pytestmark = pytest.mark.slow
DRAFTED = 3


@pytest.fixture
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def bench(server, tokenizer, tmp_path):
    output = Output(
        path=tmp_path,
        scratch=tmp_path,
        work=Work(Store(str(tmp_path / "store")), "_work/m/d"),
        log=Log("m", io.StringIO()),
    )
    config = Config(
        draft=True,
        profile=CPU.model_copy(update={"dtype": "float32", "max_model_len": 512}),
        answers=Answers(prompts=6, max_tokens=24, concurrent_prompts=6, concurrency=3),
        latency={"short": Regime(input_tokens=40, output_tokens=12, warmups=1, samples=3)},
        quality={"ifeval": Quality(max_tokens=16)},
    )
    return suites.Bench(config, tokenizer, server.client, Ledger(output, 100), output)


def prompts(count):
    source = random.Random(0)
    return [
        {
            "id": str(n),
            "category": "even" if n % 2 == 0 else "odd",
            "prompt": "?",
            "prompt_token_ids": [source.randrange(4, 300) for _ in range(20)],
        }
        for n in range(count)
    ]


def test_each_prompts_drafts_add_up_to_its_answer(bench):
    for prompt in prompts(4):
        record = answers.ask_alone(bench.client, prompt, 24)
        tokens = len(record["token_ids"])
        assert len(record["accepted"]) == DRAFTED
        assert record["accepted"] == sorted(record["accepted"], reverse=True)
        assert record["drafts"] >= (tokens - 1) / (DRAFTED + 1)
        assert tokens <= 1 + record["drafts"] + sum(record["accepted"])
        assert [top[0][0] for top in record["top"]] == record["token_ids"]
        assert all(top[0][1] >= top[1][1] for top in record["top"])


def test_drafts_of_another_client_are_never_attributed(bench, monkeypatch):
    monkeypatch.setattr(answers, "SETTLE_SECONDS", 0.0)  # a fast server answers within any patience
    other = Client(bench.client.url, bench.client.model)
    busy = threading.Thread(target=lambda: other.complete([5, 6, 7], max_tokens=480, ignore_eos=True))
    busy.start()
    try:
        while other.is_idle():
            pass
        with pytest.raises(StageError, match="otherwise idle server"):
            answers.ask_alone(bench.client, prompts(1)[0], 24)
    finally:
        busy.join()
        other.close()


def test_float32_answers_are_the_same_alone_and_together(bench):
    samples = suites.greedy(bench, prompts(6))
    alone = [sample for sample in samples if sample["concurrency"] == 1]
    together = [{**sample, "concurrency": 1} for sample in samples if sample["concurrency"] == 3]
    found = parity.compare(together, alone, True, bench.tokenizer.decode)
    assert found["passed"], found["differences"]
    assert found["compared"] == 6
    figures = suites.measure_acceptance(bench, samples, None)
    assert figures["value"] == pytest.approx(1 + sum(figures["per_position"]))
    assert set(figures["by_kind"]) == {"even", "odd"}
    assert suites.tokens_per_second(samples) > 0


def test_continuations_are_compared_with_another_measurements_of_the_same_prompts(bench, tmp_path):
    asked = prompts(6)
    asked[4]["prompt_token_ids"] = asked[4]["prompt_token_ids"][:5]
    config = bench.config.model_copy(update={"sampled": Sampled(prompts=2, draws=6, tokens=4)})
    sides = [replace(bench, config=config, output=replace(bench.output, path=tmp_path / name)) for name in "ab"]
    for side, salt in zip(sides, "ab", strict=True):
        side.output.path.mkdir()
        suites.draw_samples(side, asked, salt)
    here, there = (json.loads((side.output.path / "sampled.json").read_text()) for side in sides)
    for name in sampling.SETTINGS:
        assert list(here[name]) == ["4", "0"], "the shortest first"
        assert here[name] != there[name]
        assert {(len(many), len(one)) for many in here[name].values() for one in many} == {(6, 4)}
    found = suites.compare_samples(tmp_path / "a", tmp_path / "b", 0)
    assert found["passed"]
    assert [test["draws"] for test in found["tests"].values()] == [24, 24]
    there["temperature 1"] = {name: [[7] * 4] * 6 for name in there["temperature 1"]}
    (tmp_path / "b" / "sampled.json").write_text(json.dumps(there))
    assert not suites.compare_samples(tmp_path / "a", tmp_path / "b", 0)["passed"]
    with pytest.raises(UserError, match="continued other prompts"):
        suites.compare_samples(tmp_path / "a", tmp_path, 0)


def test_latency_samples_do_exactly_the_work_asked_for(bench):
    figures = suites.measure_latency([bench])[0]["short"]
    assert (figures["n"], figures["failed"]) == (3, 0)
    assert 0 < figures["ttft_ms"] < figures["median_ms"] <= figures["p95_ms"]
    assert figures["ttft_ms"] + 11 * figures["per_token_ms"] == pytest.approx(figures["median_ms"], rel=0.5)


def test_a_refused_request_is_a_failure_and_a_gone_server_an_error(bench):
    refused = latency.time_one(bench.client, [5] * 600, 12)
    assert "512" in refused["failed"]
    with pytest.raises(TransientError):
        latency.time_one(Client("http://127.0.0.1:9", "none"), [5], 2)


def test_quality_asks_what_the_servers_own_template_would(bench):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a prime number?"}]
    for thinking in (False, True):
        ids = prompt_token_ids(bench.tokenizer, messages, Template(thinking=thinking))
        served = bench.client.chat(messages, max_tokens=4, thinking=thinking)
        assert served.prompt_token_ids == ids
        task = exam.QualityTask("ifeval", {}, 1, 0, thinking, 4)
        (row,) = exam._answer_all(bench, task, [(messages, {"until": []})])
        assert row["output"] == bench.client.complete(ids, max_tokens=4).text
        assert row["tokens"] <= 4
