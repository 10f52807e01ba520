"""What a vLLM server counts, and when one server is worse than another by its counts."""

from dataclasses import dataclass, fields

from components.contract.errors import TransientError
from components.measure.intervals import wilson

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
LEAST_REQUESTS, LEAST_DRAFTS = 100, 1000
ACCEPTANCE, SLOWER = 0.95, 1.2


@dataclass(frozen=True)
class Window:
    """What a server's pods counted; times in seconds, summed."""

    requests: float = 0
    errors: float = 0
    drafts: float = 0
    accepted: float = 0
    first_tokens: float = 0
    first_token_seconds: float = 0
    tokens: float = 0
    token_seconds: float = 0

    def __sub__(self, earlier: "Window") -> "Window":
        """Return what lies between two moments."""
        return Window(*(getattr(self, one.name) - getattr(earlier, one.name) for one in fields(Window)))

    def __add__(self, other: "Window") -> "Window":
        """Return the sum over pods."""
        return Window(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Window)))

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts (see :mod:`components.measure.acceptance`); there must be drafts."""
        return 1 + self.accepted / self.drafts


def faults(stable: Window, canary: Window) -> list[str]:
    """Return what makes the canary worse than what serves, over the same time.

    Answers with an error of the server: their shares' 95 % intervals (Wilson) lie apart. Acceptance length: more than
    5 % shorter. Time to the first token, time between tokens: more than 20 % longer on average. Raises
    :class:`TransientError` when fewer than 100 requests or 1000 drafts were seen on either side.
    """
    for name, one in (("what serves", stable), ("the canary", canary)):
        if one.requests < LEAST_REQUESTS or one.drafts < LEAST_DRAFTS:
            seen = f"{one.requests:.0f} requests and {one.drafts:.0f} drafts"
            raise TransientError(
                f"{name} saw {seen}; {LEAST_REQUESTS} and {LEAST_DRAFTS} say enough: watch longer, or send it more"
            )
    found = []
    shares = [one.errors / one.requests for one in (stable, canary)]
    if wilson(shares[1], round(canary.requests))[0] > wilson(shares[0], round(stable.requests))[1]:
        found.append(f"{shares[1]:.1%} of its answers are errors, of the others {shares[0]:.1%}")
    before, now = stable.acceptance_length, canary.acceptance_length
    if now < ACCEPTANCE * before:
        found.append(f"acceptance length {now:.2f}, of the others {before:.2f}")
    for what, total, count in (
        ("first token after", "first_token_seconds", "first_tokens"),
        ("between tokens", "token_seconds", "tokens"),
    ):
        before, now = (getattr(one, total) / max(getattr(one, count), 1) for one in (stable, canary))
        if now > SLOWER * before:
            found.append(f"{what} {now * 1000:.0f} ms, of the others {before * 1000:.0f} ms")
    return found


def read(page: str) -> Window:
    """Read vLLM's counters off its ``/metrics``."""
    sums: dict[str, float] = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            sums[name] = sums.get(name, 0.0) + float(value)
            if name == "http_requests_total" and 'status="5xx"' in series:
                sums["errors"] = sums.get("errors", 0.0) + float(value)
    first, between = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
    latencies = [f"{one}_{what}" for one in (first, between) for what in ("count", "sum")]
    names = ["vllm:request_success_total", "errors", DRAFTS, ACCEPTED, *latencies]
    found = Window(*(sums.get(one, 0.0) for one in names))
    return found + Window(requests=found.errors)
