"""Prompts as this project renders them, against those that vLLM's chat endpoint feeds its engine."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.chats.template import Template, prompt_token_ids
from components.model.folder import set_chat_template
from components.model.testbed import TEMPLATE as TESTBED
from components.regen.agreement import demand_same_prompts
from tests.components.conftest import CHAT_TEMPLATE

pytestmark = pytest.mark.slow

# As in SmolLM2-135M-Instruct: a system turn of its own, no word of thinking.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What large models' templates do besides: contents as lists of parts, trimming, earlier thoughts left out, errors.
PARTS = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set seen = namespace(user=false) -%}
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif -%}
{%- if message.role == 'user' %}{% set seen.user = true %}{% endif -%}
{%- set said = text(message.content) | trim -%}
{%- if message.role == 'assistant' %}{% set said = said.split('</think>')[-1] | trim %}{% endif -%}
{{- '<|im_start|>' + message.role + '\\n' + said + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if not seen.user %}{{ raise_exception('nobody asks') }}{% endif -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n<think>\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '\\n</think>\\n\\n' }}{% endif -%}
{%- endif -%}"""
TEMPLATES = {"smollm2": SMOLLM2, "testbed": TESTBED, "tests": CHAT_TEMPLATE, "parts": PARTS}

CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  padded \n\n"}],
    [{"role": "user", "content": "ünïcode 日本語 🦙 \u2028 e\u0301"}],
    [{"role": "user", "content": "a <|im_end|> and <think> inside\ttext\r\n"}],
    [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo.", "reasoning_content": ""},
        {"role": "user", "content": "Three?"},
    ],
    [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo."},
        {"role": "user", "content": "Three?"},
    ],
]


@pytest.fixture(scope="module")
def own(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with PARTS as the chat template that a recipe gives it, in place of two others."""
    folder = tmp_path_factory.mktemp("own") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": SMOLLM2}))
    set_chat_template(folder, PARTS)
    return folder


@pytest.fixture(scope="module")
def trusting(own: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A server that takes a chat template with each request."""
    from components.serving.profiles import CPU
    from components.serving.server import Server

    profile = CPU.model_copy(update={"dtype": "float32", "max_model_len": 1024})
    running = Server(own, profile=profile, log_path=tmp_path_factory.mktemp("trusting") / "vllm.log")
    running.argv.append("--trust-request-chat-template")
    with running:
        running.wait()
        yield running.client


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_prompts_are_what_the_chat_endpoint_feeds(
    trusting, tiny_model: Path, name: str, thinking: bool
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATES[name]
    rendered = []
    for conversation in CONVERSATIONS:
        ours = prompt_token_ids(tokenizer, conversation, Template(thinking=thinking))
        fed = trusting.chat(conversation, max_tokens=1, thinking=thinking, chat_template=TEMPLATES[name])
        assert ours == fed.prompt_token_ids, tokenizer.decode(fed.prompt_token_ids)
        rendered.append(tokenizer.decode(ours))
    assert rendered[0].startswith("<|im_start|>")
    assert ("<think>" in rendered[0].rpartition("assistant")[2]) == (name != "smollm2")
    assert ("</think>" in rendered[0].rpartition("assistant")[2]) == (name != "smollm2" and not thinking)


@pytest.mark.parametrize("thinking", [False, True])
def test_the_chat_template_of_a_recipe_is_the_endpoint_s(trusting, own: Path, thinking: bool) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(own)
    for conversation in CONVERSATIONS:
        ours = prompt_token_ids(tokenizer, conversation, Template(thinking=thinking))
        assert ours == trusting.chat(conversation, max_tokens=1, thinking=thinking).prompt_token_ids
        tokenizer.chat_template = PARTS
        assert ours == prompt_token_ids(tokenizer, conversation, Template(thinking=thinking))


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_run_looks_whether_prompts_are_the_endpoint_s(tiny_model: Path, tmp_path: Path, name: str) -> None:
    renderer = renderer_of(tiny_model, tmp_path / "model", TEMPLATES[name])
    later_system = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "PARTS wants it first"}]
    for thinking in (False, True):
        conversations = [later_system, *CONVERSATIONS]
        demand_same_prompts(renderer, renderer.get_tokenizer(), conversations, Template(thinking=thinking))


def renderer_of(model: Path, folder: Path, chat_template: str) -> Any:
    """Return what renders chats in an engine of ``model`` with another chat template, without the engine."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers import renderer_from_config

    shutil.copytree(model, folder)
    set_chat_template(folder, chat_template)
    return renderer_from_config(EngineArgs(str(folder), dtype="float32", max_model_len=64).create_engine_config())
