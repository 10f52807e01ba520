"""vLLM in this process: prompts in, finished rows out in the order in which they finish."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.chats.rows import Row
from components.chats.template import Template, render
from components.regen.answers import answered, row_seed
from components.serving import lifetime
from components.serving.arguments import environment
from components.serving.profiles import Profile

ATTEMPTS = 3


@dataclass(frozen=True)
class Failure:
    """A row that failed every time, with its last error."""

    row_id: str
    error: str


class Engine:
    """A vLLM engine for one model folder; ``profile`` says dtype, lengths and how many rows run together."""

    def __init__(self, model: Path, profile: Profile) -> None:
        os.environ[lifetime.VARIABLE] = "1"
        os.environ.update({key: value for key, value in environment(profile).items() if key not in os.environ})
        from vllm import LLM

        options = {
            "max_model_len": profile.max_model_len,
            "max_num_batched_tokens": profile.max_num_batched_tokens,
            "gpu_memory_utilization": profile.gpu_memory_utilization,
        }
        llm = LLM(
            model=str(model),
            dtype=profile.dtype,
            max_num_seqs=profile.max_num_seqs,
            enforce_eager=profile.enforce_eager,
            enable_prefix_caching=profile.enable_prefix_caching,
            language_model_only=profile.language_model_only,
            **{name: value for name, value in options.items() if value is not None},
        )
        self._engine = llm.llm_engine
        self._tokenizer = llm.get_tokenizer()
        self._in_flight = 2 * profile.max_num_seqs

    def close(self) -> None:
        """End the engine's processes; left to the interpreter's exit, that takes minutes on a CPU."""
        self._engine.engine_core.shutdown(timeout=10.0)

    def generate(
        self, rows: Iterable[Row], template: Template, sampling: dict[str, Any], model: str
    ) -> Iterator[Row | Failure]:
        """Yield each prompt row's answer, or the :class:`Failure` it ended with, as it finishes.

        ``sampling`` holds ``temperature``, ``top_p``, ``top_k``, ``max_tokens`` and the base ``seed``. A little more
        than what runs is queued in the engine, so that it never waits for this process.
        """
        from vllm import SamplingParams

        waiting = ((row, 1) for row in rows)
        retries: deque[tuple[Row, int]] = deque()
        running: dict[str, tuple[Row, int, str]] = {}
        while True:
            while len(running) < self._in_flight:
                row, attempt = retries.popleft() if retries else next(waiting, (None, 0))
                if row is None:
                    break
                prompt = render(self._tokenizer, row["conversations"], template)
                token_ids = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
                parameters = SamplingParams(**{**sampling, "seed": row_seed(row["id"], sampling["seed"])})
                try:
                    self._engine.add_request(row["id"], {"prompt_token_ids": token_ids}, parameters)
                except ValueError as error:
                    yield Failure(row["id"], " ".join(str(error).split())[:300])
                    continue
                running[row["id"]] = row, attempt, prompt
            if not running:
                return
            for request in self._engine.step():
                if not request.finished:
                    continue
                row, attempt, prompt = running.pop(request.request_id)
                reason = request.outputs[0].finish_reason
                if reason in ("stop", "length"):
                    yield answered(row, request, prompt, template.thinking, sampling, model)
                elif attempt < ATTEMPTS:
                    retries.append((row, attempt + 1))
                else:
                    yield Failure(row["id"], f"finish_reason {reason} in each of {ATTEMPTS} attempts")
