"""One vLLM engine in a process of its own, which answers requests that come through a pipe.

The engine's worker is extended by what a study of serving needs and no server offers: another synthetic acceptance
length without a new start, and the time that the GPU was busy.
"""

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from vllm import LLM


def serve(connection: Connection, arguments: dict[str, Any], env: dict[str, str], log: Path) -> None:
    """Start vLLM, say after how many ``seconds`` it was ready, and answer until the other end is closed.

    A request is a method of :class:`Asker` with its arguments. What vLLM prints goes to ``log``.
    """
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(env)
    started = time.monotonic()
    from vllm import LLM

    asker = Asker(LLM(**arguments, worker_extension_cls=f"{__name__}.Extension"))
    connection.send({"seconds": time.monotonic() - started})
    while True:
        try:
            method, *given = connection.recv()
        except EOFError:
            return asker.close()
        connection.send(getattr(asker, method)(*given))


class Asker:
    """Asks an engine one thing at a time."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        self._vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def ask(self, tokens: int, answer: int, seed: int) -> dict[str, float]:
        """Answer a random prompt; return its ``seconds``, and how many ``drafts`` it took and ``accepted`` of them."""
        from vllm import SamplingParams

        ids = np.random.default_rng(seed).integers(self._vocabulary, size=tokens).tolist()
        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        before, started = self._counted(), time.perf_counter()
        self._llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        after = self._counted()
        return {"seconds": seconds, **{name: after[name] - before[name] for name in after}}

    def accept(self, length: float) -> None:
        """Accept so many tokens a step from now on."""
        self._llm.collective_rpc("accept", args=(length,))

    def profile(self, tokens: int, answer: int, seed: int) -> dict[str, float]:
        """Answer like :meth:`ask`; add the milliseconds in which the GPU was busy, None without one."""
        self._llm.collective_rpc("watch")
        found = self.ask(tokens, answer, seed)
        return {**found, "busy_ms": self._llm.collective_rpc("watched")[0]}

    def close(self) -> None:
        """End vLLM's own processes, for which the end of this one waits."""
        self._llm.llm_engine.engine_core.shutdown()

    def _counted(self) -> dict[str, float]:
        found = {metric.name: getattr(metric, "value", 0) for metric in self._llm.get_metrics()}
        return {name: found.get(f"vllm:spec_decode_num_{key}", 0) for name, key in COUNTERS.items()}


COUNTERS = {"drafts": "drafts", "accepted": "accepted_tokens"}


class Extension:
    """What a worker of vLLM can do besides, by ``worker_extension_cls``."""

    model_runner: Any
    watching: "torch.profiler.profile | None"

    def accept(self, length: float) -> None:
        """Set the synthetic acceptance length: all of the first drafted tokens, and a share of the next."""
        import torch
        from vllm.config.speculative import SpeculativeConfig
        from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates

        rates = self.model_runner.rejection_sampler.synthetic_conditional_rates
        wanted = SpeculativeConfig._acceptance_length_to_rates(length, len(rates))
        rates.copy_(torch.tensor(unconditional_to_conditional_rates(wanted)))

    def watch(self) -> None:
        """Begin to record what the GPU does."""
        import torch

        self.watching = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.watching = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.watching.start()

    def watched(self) -> float | None:
        """Return the milliseconds since :meth:`watch` in which the GPU did something."""
        import torch

        if self.watching is None:
            return None
        torch.cuda.synchronize()
        self.watching.stop()
        assert self.watching.profiler is not None
        events = self.watching.profiler.kineto_results.events()
        spans = [(one.start_ns(), one.duration_ns()) for one in events if one.device_type().name == "CUDA"]
        return covered([(start, start + length) for start, length in spans]) / 1e6


def covered(spans: list[tuple[int, int]]) -> int:
    """Return the length of the union of spans (start, end)."""
    if not spans:
        return 0
    starts, ends = np.array(sorted(spans), dtype=np.int64).T
    reached = np.maximum.accumulate(ends)
    gaps = np.maximum(starts[1:] - reached[:-1], 0)
    return int(reached[-1] - starts[0] - gaps.sum())
