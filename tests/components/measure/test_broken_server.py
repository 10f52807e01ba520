"""Servers that answer what is no answer, over real HTTP on loopback: one line, and nothing false is kept."""

import json

import pytest

from components.contract.errors import StageError, UserError
from components.measure.bench import run
from components.measure.job import Job
from components.measure.stage import Config, Regime
from components.serving.client import Client
from tests import loopback

CONFIG = Config(latency={"one": Regime(input_tokens=20, output_tokens=4, warmups=0, samples=2)})
LATENCY = "all 2 requests of latency.one failed: .*"
FORM = "the answer is not of the OpenAI API's form"
SOUND = "".join(
    f"data: {json.dumps(event)}\n\n"
    for event in [
        *[{"choices": [{"text": "x", "finish_reason": None}]}] * 4,
        {"choices": [{"text": "", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 4}},
    ]
)


class Handler(loopback.Handler):
    """Lists one model, tokenizes by characters, and completes with the server's ``status`` and ``answer``."""

    def do_GET(self):
        self.reply(200, json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.reply(200, self.server.tokens or json.dumps({"tokens": [ord(one) for one in body["prompt"]]}))
        else:
            self.server.asked += 1
            self.reply(self.server.status, self.server.answer)


def serving(answer, status=200, tokens=None):
    """Serve for the time of a block; yield the server, whose fields may be changed meanwhile, and its URL."""
    return loopback.serving(Handler, answer=answer, status=status, tokens=tokens, asked=0)


@pytest.fixture
def timed(tmp_path, monkeypatch):
    """Measure latency at a URL with files of this test's own."""
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))

    def measure(url, kind="latency", **inputs):
        job = Job(kind=kind, urls=(url,), config=CONFIG, **inputs)
        return run(job, tmp_path / "out", tmp_path / "scratch")["figures"][0]

    return measure


@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        ("<html>hello</html>", 200, "the stream ended before the answer did"),
        ("", 200, "the stream ended before the answer did"),
        ("data: <html>\n\n", 200, FORM),
        ("data: [1]\n\n", 200, FORM),
        ('data: {"a": 1}\n\n', 200, FORM),
        ('data: {"choices": [{"finish_reason": null}]}\n\n', 200, FORM),
        (SOUND.partition("\n")[0] + "\n\n", 200, "the stream ended before the answer did"),
        ("boom", 500, "status 500: boom"),
    ],
)
def test_a_stream_that_is_none_is_a_failed_request(timed, answer, status, why):
    with serving(answer, status) as (_, url), pytest.raises(UserError, match=LATENCY + why):
        timed(url)


@pytest.mark.parametrize("answer", ["<html>", "[]", "{}", '{"choices": []}', '{"choices": [{"text": "x"}]}'])
def test_an_answer_of_another_form_is_one_line(answer):
    with serving(answer) as (_, url):
        client = Client(url, "m")
        for ask in (
            lambda: client.complete([1], max_tokens=1),
            lambda: client.chat([{"role": "user", "content": "x"}], max_tokens=1),
        ):
            with pytest.raises(StageError, match=FORM) as raised:
                ask()
            assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("tokens", ["<html>", "{}"])
def test_a_tokenizer_of_another_form_asks_for_a_folder(timed, tokens):
    with serving(SOUND, tokens=tokens) as (_, url), pytest.raises(UserError, match="--tokenizer FOLDER"):
        timed(url)


def test_after_every_request_failed_the_same_command_asks_again(timed):
    with serving("boom", 500) as (server, url):
        with pytest.raises(UserError, match="status 500"):
            timed(url)
        server.status, server.answer, before = 200, SOUND, server.asked
        figures = timed(url)["one"]
        assert (figures["n"], figures["failed"], server.asked - before) == (2, 0, 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "has no text"), ("{}\n", "neither context nor text"), ("[1]\n", "no JSON object"), ('{"text": "a', "torn")],
)
def test_texts_that_are_none_are_refused_and_not_replaced(timed, tmp_path, text, why):
    (tmp_path / "texts.jsonl").write_text(text)
    with serving(SOUND) as (server, url):
        with pytest.raises(UserError, match=why):
            timed(url, texts=tmp_path / "texts.jsonl")
        assert server.asked == 0


def test_a_prompt_row_without_conversations_is_refused(timed, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    with serving(SOUND) as (_, url), pytest.raises(UserError, match="a row has no conversations"):
        timed(url, kind="acceptance", prompts=tmp_path / "prompts.jsonl")
