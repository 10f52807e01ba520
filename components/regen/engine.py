"""One vLLM engine: prompt rows in, finished rows out in the order in which they finish."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.chats.rows import Row
from components.chats.template import Template, render
from components.regen.agreement import demand_same_prompts
from components.regen.answers import answered, row_seed, split_reasoning
from components.serving.arguments import environment
from components.serving.profiles import Profile


@dataclass(frozen=True)
class Asked:
    """What every row is asked: ``sampling`` holds ``temperature``, ``top_p``, ``top_k``, ``max_tokens``, ``seed``.

    ``model`` is the model's digest, which the rows keep. The prompts of ``samples``, some conversations, have to be
    those that vLLM's chat endpoint makes of them.
    """

    template: Template
    sampling: dict[str, Any]
    model: str
    samples: tuple[list[dict[str, str]], ...] = ()


@dataclass(frozen=True)
class Fault:
    """One attempt at a row that gave no answer; ``transient`` when its cause is not the row."""

    row_id: str
    error: str
    transient: bool = False


class Engine:
    """A vLLM engine for one model folder; ``profile`` says dtype, lengths and how many rows run together."""

    def __init__(self, model: Path, profile: Profile, asked: Asked) -> None:
        os.environ.update({key: value for key, value in environment(profile).items() if key not in os.environ})
        from vllm import LLM
        from vllm.platforms import current_platform

        options = {
            "max_model_len": profile.max_model_len,
            "max_num_batched_tokens": profile.max_num_batched_tokens,
            "gpu_memory_utilization": profile.gpu_memory_utilization,
            # A prompt in chunks makes vLLM turn its row's random generator back, which a CPU's generator cannot.
            "enable_chunked_prefill": False if current_platform.is_cpu() else None,
        }
        self.llm = LLM(
            model=str(model),
            dtype=profile.dtype,
            max_num_seqs=profile.max_num_seqs,
            enforce_eager=profile.enforce_eager,
            enable_prefix_caching=profile.enable_prefix_caching,
            language_model_only=profile.language_model_only,
            **{name: value for name, value in options.items() if value is not None},
        )
        self._engine = self.llm.llm_engine
        self._tokenizer = self.llm.get_tokenizer()
        self._asked = asked
        self._running: dict[str, tuple[Row, str]] = {}
        demand_same_prompts(self.llm.renderer, self._tokenizer, asked.samples, asked.template)

    @property
    def busy(self) -> bool:
        """Whether rows are queued or being answered."""
        return bool(self._running)

    def add(self, row: Row) -> None:
        """Render a prompt row and queue it. Raises what the template or vLLM says against it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompt = render(self._tokenizer, row["conversations"], self._asked.template)
        token_ids = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
        sampling = {**self._asked.sampling, "seed": row_seed(row["id"], self._asked.sampling["seed"])}
        # Text is made once a row and not token by token: for a small model that would take longer than its steps.
        parameters = SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)
        self._engine.add_request(row["id"], {"prompt_token_ids": token_ids}, parameters)
        self._running[row["id"]] = row, prompt

    def step(self) -> Iterator[Row | Fault]:
        """Advance every running row; yield those that ended."""
        asked = self._asked
        for request in self._engine.step():
            if not request.finished:
                continue
            row, prompt = self._running.pop(request.request_id)
            reason = request.outputs[0].finish_reason
            if reason in ("stop", "length"):
                split = split_reasoning(self._text(request), prompt, asked.template.thinking)
                yield answered(row, request, split, asked.sampling, asked.model)
            else:
                yield Fault(row["id"], f"finish_reason {reason}", transient=True)

    def _text(self, request: Any) -> str:
        """Return an answer's text; of a character that the length cut in two, nothing."""
        answer = request.outputs[0]
        text: str = self._tokenizer.decode(
            answer.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text.rstrip("\ufffd") if answer.finish_reason == "length" else text

    def close(self) -> None:
        """End the engine's processes, where it has some."""
        self._engine.engine_core.shutdown(timeout=10.0)
