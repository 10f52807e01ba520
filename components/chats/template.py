"""The recipe's one ``template`` section, and the one way to turn a conversation into prompt token ids."""

import re
from typing import Any

from pydantic import Field

from components.contract.digest import StageConfig

_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*\Z")


class Template(StageConfig):
    """How conversations become tokens, for every stage and for the served endpoint alike."""

    thinking: bool = Field(False, description="Value of the chat template's enable_thinking variable")


def render(tokenizer: Any, conversation: list[Any], template: Template) -> Any:
    """Return the prompt text that ends where the assistant's answer begins; of many conversations, a list."""
    return tokenizer.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True, enable_thinking=template.thinking
    )


def render_answered(
    tokenizer: Any, conversations: list[list[dict[str, str]]], template: Template
) -> list[tuple[str, str]]:
    """Return the prompt's text and the answer's of each conversation; all end on an assistant turn.

    An answer ends with the end-of-text token where the template writes one; what follows that token belongs to no
    answer. Raises :class:`ValueError` when a template does not render an answer as its prompt's continuation, but for
    the empty thought that a prompt may end on and that the template leaves out of an answer without one.
    """
    prompts = render(tokenizer, [turns[:-1] for turns in conversations], template)
    wholes = tokenizer.apply_chat_template(conversations, tokenize=False, enable_thinking=template.thinking)
    rendered = []
    for turns, prompt, whole in zip(conversations, prompts, wholes, strict=True):
        start = prompt if whole.startswith(prompt) else _EMPTY_THOUGHT.sub("", prompt)
        answer = whole.removeprefix(start)
        is_thought_again = start != prompt and answer.startswith("<think>")
        if turns[-1]["role"] != "assistant" or not whole.startswith(start) or is_thought_again:
            raise ValueError(f"its last turn is not rendered as the prompt's answer (thinking: {template.thinking})")
        text, end, _ = answer.rpartition(tokenizer.eos_token)
        rendered.append((prompt, text + end if end else answer))
    return rendered


def prompt_token_ids(tokenizer: Any, conversation: list[dict[str, str]], template: Template) -> list[int]:
    """Return the prompt's token ids: rendered first, then encoded without adding special tokens."""
    return tokenizer(render(tokenizer, conversation, template), add_special_tokens=False)["input_ids"]
