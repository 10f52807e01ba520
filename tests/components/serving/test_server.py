"""Against the real vLLM: its own argument parser, and one running server."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from components.chats.template import Template, prompt_token_ids
from components.contract.errors import StageError
from components.serving.arguments import arguments
from components.serving.client import Client
from components.serving.profiles import PROFILES
from components.serving.server import cause_of

pytestmark = pytest.mark.slow
CHAT = [{"role": "system", "content": "Short answers."}, {"role": "user", "content": "What do cats  eat?\n"}]
LAUNCH = """
import sys, time
from pathlib import Path
from components.serving.server import Server
server = Server(Path(sys.argv[1]), log_path=Path(sys.argv[2]))
with server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("name", PROFILES)
def test_vllm_s_own_parser_understands_every_profile(name: str, tiny_model: Path, tiny_draft: Path) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    profile = PROFILES[name].model_copy(update={"cudagraph_capture_sizes": (1, 4)})
    argv = arguments(profile, tiny_model, tiny_draft, served_model_name="pair", port=8123)
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(argv[2:])
    assert parsed.model_tag == str(tiny_model)
    assert (parsed.served_model_name, parsed.port, parsed.host) == (["pair"], 8123, "127.0.0.1")
    for field in ("dtype", "max_num_seqs", "max_model_len", "max_num_batched_tokens", "enforce_eager"):
        expected = getattr(profile, field)
        if expected is not None:
            assert getattr(parsed, field) == expected
    assert parsed.enable_prefix_caching is False
    assert parsed.language_model_only is profile.language_model_only
    assert parsed.cudagraph_capture_sizes == [1, 4]
    assert parsed.speculative_config["num_speculative_tokens"] == 3


@pytest.mark.parametrize("thinking", [False, True])
def test_rendered_prompts_are_what_the_chat_endpoint_feeds(server, tiny_model: Path, thinking: bool) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    answer = server.client.chat(CHAT, max_tokens=2, thinking=thinking)
    assert answer.prompt_token_ids == prompt_token_ids(tokenizer, CHAT, Template(thinking=thinking))


def test_invocations_thinks_when_told_in_the_template_s_words_only(server) -> None:
    """The published service reads ``thinking``; vLLM's route of that name knows no such field and passes it over."""
    routed = Client(server.url, server.client.model, invocations=True)
    assert routed.is_healthy()
    asked = {on: routed.chat(CHAT, max_tokens=2, thinking=on).prompt_token_ids for on in (False, True)}
    assert asked == {on: server.client.chat(CHAT, max_tokens=2, thinking=on).prompt_token_ids for on in (False, True)}
    assert asked[False] != asked[True]
    body = {"messages": CHAT, "max_tokens": 2, "return_token_ids": True}
    unasked, told, told_not = (
        httpx.post(f"{server.url}/invocations", json={**body, **more}, timeout=60).json()["prompt_token_ids"]
        for more in ({}, {"thinking": True}, {"thinking": False})
    )
    assert unasked == told == told_not
    routed.close()


def test_greedy_tokens_lead_their_candidates_and_repeat(server) -> None:
    first = server.client.complete([10, 11, 12], max_tokens=12, logprobs=3, ignore_eos=True)
    assert first.prompt_token_ids == [10, 11, 12]
    assert (len(first.token_ids), len(first.logprobs), first.finish_reason) == (12, 12, "length")
    for token, candidates in zip(first.token_ids, first.logprobs, strict=True):
        assert max(candidates, key=candidates.__getitem__) == token
        assert all(value <= 0 for value in candidates.values())
    again = server.client.stream([10, 11, 12], max_tokens=12, ignore_eos=True)
    assert again.token_ids == first.token_ids
    assert 0 < again.first_token_seconds < again.seconds


def test_counters_count_this_prompt_s_drafts(server) -> None:
    before = server.client.metrics()
    answer = server.client.complete([20, 21, 22], max_tokens=32, ignore_eos=True)
    delta = server.client.metrics() - before
    assert server.client.is_idle()
    assert delta.generation_tokens == len(answer.token_ids) == 32
    assert delta.draft_tokens == 3 * delta.drafts
    assert len(delta.accepted_per_position) == 3
    assert sum(delta.accepted_per_position) == delta.accepted_tokens
    # Each step gives 1 + accepted tokens; the prefill gives the first, and the last step may give more than is kept.
    assert 31 <= delta.drafts + delta.accepted_tokens <= 31 + 3


def test_refused_requests_raise(server) -> None:
    with pytest.raises(StageError, match=r"status 4\d\d"):
        server.client.complete([1] * 600, max_tokens=4)


def test_server_does_not_outlive_a_killed_parent(tiny_model: Path, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(tiny_model), str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    group = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _members(group):
        time.sleep(1)
    assert not _members(group)


def test_failure_names_the_cause_not_its_aftermath() -> None:
    log = "\n".join(
        [
            "INFO start",
            "(EngineCore pid=7) ERROR ValueError: head size 17 is not supported",
            "RuntimeError: Engine core initialization failed. See root cause above.",
        ]
    )
    assert cause_of(log) == "ValueError: head size 17 is not supported"
    assert cause_of(json.dumps("")) == '""'


def _members(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(entry.name))
    return found
