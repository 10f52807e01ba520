"""The tokenizer of the core role against transformers' own: the same text, byte for byte, and the same ids."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from components.chats.template import Template, prompt_token_ids, render
from components.chats.tokenizer import FILES, Tokenizer, read_chat_template
from components.contract.errors import UserError
from components.model.testbed import TEMPLATE, build_tokenizer
from tests.components.conftest import CHAT_TEMPLATE

SYSTEM_FIRST = """\
{%- if messages[0]['role'] == 'system' %}{% set start = 1 %}{{ bos_token + messages[0]['content'] | trim }}
{%- else %}{% set start = 0 %}{{ bos_token }}{% endif %}
{% for message in messages[start:] %}
    {%- if message['role'] not in ('user', 'assistant') %}{{ raise_exception('no ' + message['role']) }}{% endif %}
    {%- if message['role'] == 'assistant' and not loop.last %}{% continue %}{% endif %}
    {% generation %}{{ message | tojson }}{% endgeneration %}
{% endfor %}
{% if add_generation_prompt %}{{ eos_token }}{{ strftime_now('%Y') }}{% endif %}"""
"""What real templates use: trimmed blocks, loop controls, tojson, special tokens, errors, the date, answer marks."""

CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": " Be <brief> & 'kind'. "},
        {"role": "user", "content": "Grüße, 世界! 👋\n\n  \ttabs"},
    ],
    [
        {"role": "user", "content": "1 + 1 = 2\u2028<|im_start|>user"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": 'Quote "this" \\ and {% that %}.'},
    ],
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("testbed-tokenizer")
    build_tokenizer(512, 0).save_pretrained(folder)
    return folder


def read(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text(encoding="utf-8") for name in FILES if (folder / name).exists()}


@pytest.mark.parametrize("template", [TEMPLATE, CHAT_TEMPLATE, SYSTEM_FIRST], ids=["testbed", "chatml", "full"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("thinking", [False, True])
def test_text_and_ids_are_those_of_transformers(
    trained: Path, tmp_path: Path, template: str, conversation: list, thinking: bool
) -> None:
    theirs = AutoTokenizer.from_pretrained(trained)
    theirs.bos_token = "<|im_start|>"
    theirs.chat_template = template
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer(read(tmp_path))
    section = Template(thinking=thinking)
    text = render(theirs, conversation, section)
    assert render(ours, conversation, section) == text
    ids = prompt_token_ids(theirs, conversation, section)
    assert prompt_token_ids(ours, conversation, section) == ids
    assert ours.lengths([text, ""]) == [len(ids), 0]
    assert ours.decode(ids) == theirs.decode(ids)


def test_what_a_folder_lacks_is_named(trained: Path) -> None:
    files = read(trained)
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        Tokenizer({name: text for name, text in files.items() if name != "tokenizer.json"})
    config = json.dumps({"eos_token": "<|im_end|>"})
    with pytest.raises(UserError, match="no single chat template"):
        Tokenizer({"tokenizer.json": files["tokenizer.json"], "tokenizer_config.json": config})
    with pytest.raises(UserError, match="does not compile"):
        Tokenizer({**files, "chat_template.jinja": "{% if %}"})


def test_a_template_inside_the_tokenizers_config_is_read(trained: Path) -> None:
    config = json.dumps(
        {"eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ messages[0].content }}{{ eos_token }}"}
    )
    ours = Tokenizer({"tokenizer.json": read(trained)["tokenizer.json"], "tokenizer_config.json": config})
    assert render(ours, CONVERSATIONS[0], Template()) == "What is the capital of France?<|im_end|>"


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
EVERY = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"


def test_a_template_must_render_the_question_wherever_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    for text in (EVERY, NO_SYSTEM + EVERY, SYSTEM_FIRST):
        path.write_text(text)
        assert read_chat_template(path) == text
    for text in ("{{ messages[0].content }}", "{% if messages[0].role == 'user' %}" + EVERY + "{% endif %}"):
        path.write_text(text)
        with pytest.raises(UserError, match="leaves the question out"):
            read_chat_template(path)
