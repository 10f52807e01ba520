"""A vLLM server's counters, read from the text of its ``/metrics``."""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Metrics:
    """The server's counters at one moment; subtract two moments to get what lies between."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    generation_tokens: int
    running: int
    waiting: int

    def __sub__(self, earlier: "Metrics") -> "Metrics":
        """Return the counters' difference; ``running`` and ``waiting`` stay those of the later moment."""
        return Metrics(
            drafts=self.drafts - earlier.drafts,
            draft_tokens=self.draft_tokens - earlier.draft_tokens,
            accepted_tokens=self.accepted_tokens - earlier.accepted_tokens,
            accepted_per_position=tuple(
                now - before
                for now, before in zip(self.accepted_per_position, earlier.accepted_per_position, strict=True)
            ),
            generation_tokens=self.generation_tokens - earlier.generation_tokens,
            running=self.running,
            waiting=self.waiting,
        )

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens a step: 1 + accepted / drafts (the bonus token included); None without drafts."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None


def read_metrics(text: str) -> Metrics:
    """Parse the counters. Those of speculation are 0 (and positions empty) without a drafter."""
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                position = int(sample.labels["position"])
                positions[position] = positions.get(position, 0) + sample.value
            else:
                totals[sample.name] = totals.get(sample.name, 0) + sample.value
    return Metrics(
        drafts=int(totals.get("vllm:spec_decode_num_drafts_total", 0)),
        draft_tokens=int(totals.get("vllm:spec_decode_num_draft_tokens_total", 0)),
        accepted_tokens=int(totals.get("vllm:spec_decode_num_accepted_tokens_total", 0)),
        accepted_per_position=tuple(int(positions[position]) for position in sorted(positions)),
        generation_tokens=int(totals["vllm:generation_tokens_total"]),
        running=int(totals["vllm:num_requests_running"]),
        waiting=int(totals["vllm:num_requests_waiting"]),
    )
