"""A model's tokenizer without transformers: its chat template by Jinja, its token ids by ``tokenizers``.

For stages whose role has no torch. It takes the place of transformers' tokenizer in
:func:`components.chats.template.render` and :func:`components.chats.template.prompt_token_ids`; the tests hold both to
the same bytes and ids.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from components.chats.rows import read_lines
from components.contract.errors import UserError, one_line

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_QUESTION = "What is the capital of France?"


class Tokenizer:
    """Made from the texts of a model folder's :data:`FILES`, by name; a template may stand in either of the last two.

    Raises :class:`UserError` naming the file that is missing or wrong.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        if "tokenizer.json" not in files:
            raise UserError("model: no tokenizer.json in it; prompts are measured with the tokenizers library")
        self._tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = json.loads(files.get("tokenizer_config.json", "{}"))
        template = files.get("chat_template.jinja") or config.get("chat_template")
        if not isinstance(template, str):
            raise UserError(
                "model: no single chat template in it (chat_template.jinja); an instruction-tuned one is needed"
            )
        try:
            self._template = _environment().from_string(template)
        except TemplateError as error:
            raise UserError(f"model: its chat template does not compile ({one_line(error, 200)})") from error
        self._special = {name: _content(token) for name, token in config.items() if name.endswith("_token")}

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> str:
        """Return the rendered text. ``tokenize`` is False always: text is rendered first and encoded then."""
        assert not tokenize
        return self._template.render(
            messages=conversation,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._special,
            **variables,
        )

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        """Return ``{"input_ids": token ids}``."""
        return {"input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def lengths(self, texts: list[str]) -> list[int]:
        """Return the number of tokens of each text, without special tokens that it does not spell out."""
        return [len(one) for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def read_chat_template(path: Path) -> str:
    """Return the text of a chat template's file.

    Raises :class:`UserError` when it does not compile or does not render a question, alone, after another one and
    after a system turn, with and without thinking. A template may refuse system turns.
    """
    text = "".join(read_lines(path))
    question = {"role": "user", "content": _QUESTION}
    earlier = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello!"}]
    system = {"role": "system", "content": "Answer briefly."}
    variables: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
    variables |= {name: f"<{name}>" for name in _SPECIAL}
    rendered = []
    try:
        template = _environment().from_string(text)
        for thinking in (False, True):
            for turns in ([question], [*earlier, question]):
                rendered.append(template.render(messages=turns, enable_thinking=thinking, **variables))
            with contextlib.suppress(TemplateError):
                turns = [system, question]
                rendered.append(template.render(messages=turns, enable_thinking=thinking, **variables))
    except Exception as error:  # a template may divide by zero as well
        raise UserError(f"{path}: no chat template that works ({one_line(error, 200)})") from error
    if not all(_QUESTION in one for one in rendered):
        raise UserError(f"{path}: leaves the question out of the prompt that it renders; it is no chat template")
    return text


def _content(token: Any) -> Any:
    """Return a special token's text; ``tokenizer_config.json`` may hold it with its properties."""
    return token.get("content") if isinstance(token, dict) else token


class _Generation(Extension):
    """Renders what stands between ``generation`` and ``endgeneration``; transformers marks answers with these tags."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja as chat templates are written for it: the settings and functions that transformers has."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )

    def tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
