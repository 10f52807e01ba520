"""The cost model: latency at batch 1 from bytes, FLOPs and acceptance, on a named GPU.

A pass over the weights takes the longest of three times: its bytes over the bandwidth, its FLOPs over the arithmetic
rate (the roofline of Williams, Waterman and Patterson, 2009), and the time the host needs to launch it, which runs
ahead of the device and shows only where the device is faster. A request is one prefill pass and
``(output − 1) / acceptance length`` decoding steps (Leviathan et al., arXiv 2211.17192, section 3; the first token
comes from the prefill). How good this is against published and measured figures: ``docs/results/cost-model.md``.
"""

from dataclasses import dataclass

from components.checkpoint.step_bytes import Model, step_bytes


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet: ``bandwidth`` in bytes/s, ``flops`` dense BF16 with fp32 sums in FLOP/s."""

    bandwidth: float
    flops: float


A10G = Gpu(600e9, 70e12)
RTX_5000_ADA = Gpu(576e9, 261e12)
H200 = Gpu(4.8e12, 989e12)
"""NVIDIA's data sheets; the RTX 5000 Ada's names 1,044 TFLOP/s in FP8 with sparsity, four times dense BF16."""


@dataclass(frozen=True)
class Constants:
    """What a data sheet does not say: shares of its bandwidth and FLOPs that are reached, and the host's seconds.

    The host's seconds are floors: of the prefill pass, of a step of the target alone, and of a step with a drafter.
    """

    memory: float
    compute: float
    host_prefill: float = 0.0
    host_step: float = 0.0
    host_draft_step: float = 0.0


FITTED = Constants(0.7036, 0.7075, host_prefill=0.03122, host_step=0.00372, host_draft_step=0.00792)
"""Fitted to two published A10G rows and three H200 rows of Qwen3.5-4B: ``docs/results/cost-model.md``."""
ERROR_ALONE, ERROR_DRAFTED, ERROR_UNKNOWN = 0.09, 0.19, 0.61
"""The largest relative errors there: without a drafter, at a known acceptance length, and at an unknown one."""


@dataclass(frozen=True)
class Request:
    """One request: prompt and answer in tokens, and the tokens that a step yields on average (1 without a drafter)."""

    input_tokens: int
    output_tokens: int
    accepted: float = 1.0

    @property
    def steps(self) -> float:
        """Decoding steps; the first token comes from the prefill."""
        return (self.output_tokens - 1) / self.accepted

    @property
    def context(self) -> int:
        """Mean tokens in the KV cache over the answer."""
        return self.input_tokens + self.output_tokens // 2


@dataclass(frozen=True)
class Latency:
    """Seconds of the prefill pass, seconds of a step, and the steps."""

    prefill: float
    step: float
    steps: float

    @property
    def seconds(self) -> float:
        """The whole request."""
        return self.prefill + self.steps * self.step


def prefill_flops(target: Model, tokens: int) -> float:
    """Return the FLOPs of a prompt: 2 a matrix element and token, n²/2 attended pairs, one row of the head.

    (Kaplan et al., arXiv 2001.08361, section 2.1.) The recurrence of linear attention, about a hundredth, is left out.
    """
    pairs = tokens * (tokens + 1) / 2
    return 2.0 * target.parameters * tokens + target.attention * pairs + 2.0 * target.head_parameters


def predict(gpu: Gpu, constants: Constants, request: Request, target: Model, drafter: Model | None = None) -> Latency:
    """Return the predicted latency of a request that is alone on the GPU."""
    moved = sum(step_bytes(target, request.context, drafter).values())
    floor = constants.host_draft_step if drafter else constants.host_step
    weights = (target.linears + target.head) / (gpu.bandwidth * constants.memory)
    arithmetic = prefill_flops(target, request.input_tokens) / (gpu.flops * constants.compute)
    return Latency(
        prefill=max(weights, arithmetic, constants.host_prefill),
        step=max(moved / (gpu.bandwidth * constants.memory), floor),
        steps=request.steps,
    )


def implied_acceptance(seconds: float, predicted: Latency, request: Request) -> float:
    """Return the acceptance length at which a request would take ``seconds``, all else as predicted."""
    return (request.output_tokens - 1) * predicted.step / (seconds - predicted.prefill)


@dataclass(frozen=True)
class Measured:
    """One measured request: whose, and its seconds."""

    request: Request
    target: Model
    drafter: Model | None
    seconds: float


def fit(gpu: Gpu, one: Measured, other: Measured) -> Constants | None:
    """Return the constants with which two measured requests take the time they took, the host left out.

    Time is linear in the inverses of both shares, once it is known what bounds the prefill: that is taken from the
    data sheet. None when the two rows do not tell the shares apart, or no positive shares explain them.
    """
    (a, b), (c, d) = (_seconds_at_peak(gpu, row) for row in (one, other))
    determinant = a * d - b * c
    if abs(determinant) < 1e-9:
        return None
    memory = (one.seconds * d - b * other.seconds) / determinant
    compute = (a * other.seconds - one.seconds * c) / determinant
    return Constants(1 / memory, 1 / compute) if memory > 0 and compute > 0 else None


def _seconds_at_peak(gpu: Gpu, row: Measured) -> tuple[float, float]:
    """Return the seconds bound by memory and by arithmetic, at the data sheet's rates."""
    peak = predict(gpu, Constants(1.0, 1.0), row.request, row.target, row.drafter)
    decoding = peak.steps * peak.step
    weights = (row.target.linears + row.target.head) / gpu.bandwidth
    return (decoding + weights, 0.0) if peak.prefill == weights else (decoding, peak.prefill)
