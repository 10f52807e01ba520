"""The recipe's one ``template`` section, and the one way to turn a conversation into prompt token ids."""

from typing import Any

from pydantic import Field

from components.contract.digest import StageConfig


class Template(StageConfig):
    """How conversations become tokens, for every stage and for the served endpoint alike."""

    thinking: bool = Field(False, description="Value of the chat template's enable_thinking variable")


def render(tokenizer: Any, conversation: list[dict[str, str]], template: Template) -> str:
    """Return the prompt text that ends where the assistant's answer begins."""
    return tokenizer.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True, enable_thinking=template.thinking
    )


def prompt_token_ids(tokenizer: Any, conversation: list[dict[str, str]], template: Template) -> list[int]:
    """Return the prompt's token ids: rendered first, then encoded without adding special tokens."""
    return tokenizer(render(tokenizer, conversation, template), add_special_tokens=False)["input_ids"]
