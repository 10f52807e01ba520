"""A server that runs already, ours or anyone's: what it serves, and the tokenizer that prompts are made with."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from components.chats.tokenizer import FILES, Tokenizer
from components.contract.errors import StageError, TransientError, UserError
from components.serving.client import Client


@dataclass(frozen=True)
class Endpoint:
    """A server that answered: its client, its tokenizer, and ``serves`` {url, model, root, max_model_len}."""

    client: Client
    tokenizer: Any
    serves: dict[str, Any]

    @property
    def longest(self) -> int | None:
        """The longest prompt plus answer in tokens, where the server says."""
        return self.serves["max_model_len"]


class ServedTokenizer:
    """The server's own tokenizer and chat template, over vLLM's ``/tokenize`` and ``/detokenize``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        """Encode a text, as a local tokenizer does when called."""
        return {"input_ids": self._client.tokenize(prompt=text, add_special_tokens=add_special_tokens)}

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool, enable_thinking: bool
    ) -> str:
        """Return the prompt's text, as the server renders it."""
        assert not tokenize, "prompts are rendered first and encoded then"
        return self.decode(
            self._client.tokenize(
                messages=conversation,
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs={"enable_thinking": enable_thinking},
            )
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return self._client.detokenize(ids)


def connect(url: str, model: str | None, tokenizer: Path | None, invocations: bool) -> Endpoint:
    """Find out what ``url`` serves.

    ``model`` names one of several served models. The tokenizer is the folder's when one is given, else the server's.
    Raises :class:`TransientError` when nothing answers, :class:`UserError` when what answers cannot be measured.
    """
    base = url.rstrip("/").removesuffix("/v1")
    try:
        address = httpx.URL(base)
    except (httpx.InvalidURL, TypeError) as error:
        raise UserError(f"{url}: not a URL ({error})") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise UserError(f"{url}: not a URL; http://host:port is expected")
    if address.userinfo:
        raise UserError(f"{address.host}: its URL holds credentials; put the key into VLLM_API_KEY")
    listed = {one["id"]: one for one in Client(base, "").models()}
    if model is None and len(listed) != 1:
        raise UserError(f"{url}: serves {', '.join(listed) or 'nothing'}; choose with --model")
    if model is not None and model not in listed:
        raise UserError(f"{url}: serves {', '.join(listed)}, not {model}")
    name = model or next(iter(listed))
    client = Client(base, name, invocations)
    if invocations and not client.is_healthy():
        raise UserError(f"{base}/ping: does not answer 200; leave --invocations out for a server without that route")
    one = listed[name]
    serves = {"url": base, "model": name, "root": one.get("root"), "max_model_len": one.get("max_model_len")}
    return Endpoint(client, _tokenizer(client, tokenizer), serves)


def _tokenizer(client: Client, folder: Path | None) -> Any:
    if folder is None:
        try:
            client.tokenize(prompt="a", add_special_tokens=False)
        except TransientError:
            raise
        except StageError as error:
            raise UserError(f"{error}; give the model's tokenizer: --tokenizer FOLDER") from error
        return ServedTokenizer(client)
    return Tokenizer(
        {name: (folder / name).read_text(encoding="utf-8") for name in FILES if (folder / name).is_file()}
    )
