"""Our prompts and those of vLLM's chat endpoint are the same: looked at in every run, whatever the chat template."""

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from components.chats.template import Template, prompt_token_ids
from components.contract.errors import UserError


def demand_same_prompts(
    renderer: Any, tokenizer: Any, conversations: Iterable[list[dict[str, str]]], template: Template
) -> None:
    """Compare token ids with what an endpoint of ``renderer``, an engine's own, would be fed for the same messages.

    A conversation that the chat template refuses is passed over: its row fails in its turn.

    Raises:
        UserError: the ids differ; it quotes both prompts from where they do.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers import TokenizeParams

    for conversation in conversations:
        try:
            ours = prompt_token_ids(tokenizer, conversation, template)
        except Exception:
            continue
        request = ChatCompletionRequest(
            messages=deepcopy(conversation),  # vLLM renames a turn's fields in place
            chat_template_kwargs={"enable_thinking": template.thinking},
        )
        asked = request.build_chat_params(None, "auto").with_defaults({"tools": None, "tokenize": False})
        unlimited = TokenizeParams(None, add_special_tokens=request.add_special_tokens)
        _, (prompt,) = renderer.render_chat([request.messages], asked, unlimited)
        if ours != (theirs := list(prompt["prompt_token_ids"])):
            raise UserError(_difference(tokenizer, ours, theirs, template))


def _difference(tokenizer: Any, ours: list[int], theirs: list[int], template: Template) -> str:
    pairs = zip(ours, theirs, strict=False)
    start = next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
    ends = [tokenizer.decode(ids[max(0, start - 4) :][:24]) for ids in (ours, theirs)]
    return (
        f"chat template: from token {start} on a prompt is {ends[0]!r} here and {ends[1]!r} at vLLM's chat endpoint "
        f"(thinking: {template.thinking}); give one that renders contents as plain text (template.chat_template)"
    )
