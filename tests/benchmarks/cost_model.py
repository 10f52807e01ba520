"""Study ``cost-model``: the cost model against published and measured latencies of Qwen3.5-4B at batch 1.

``python tests/benchmarks/cost_model.py`` computes every row from the true shapes (no weights, no GPU) and writes
docs/results/cost-model.*.
"""

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import study
from cost_shapes import models

from components.checkpoint.step_bytes import Model, step_bytes
from components.measure.cost import (
    A10G,
    H200,
    RTX_5000_ADA,
    Constants,
    Gpu,
    Measured,
    Request,
    fit,
    implied_acceptance,
    predict,
)

GPUS = {"a10g": A10G, "ada": RTX_5000_ADA, "h200": H200}
SHAPES = {"short": (64, 128), "medium": (2048, 256), "long": (8192, 256)}
ACCEPTED, LOW, HIGH = 5.0, 4.9, 5.1
CONTEXT = 2176
FITTED = ("a10g, BF16, short", "a10g, BF16, long")
FITTED_HOST = ("h200, BF16, short", "h200, BF16, medium", "h200, W4 + W4 drafter, short")
PAIR = "W4 + W4 drafter"
STEPS = {"BF16": ("BF16", ""), "W4": ("W4", ""), PAIR: ("W4", "W4 drafter")}
SECOND_HAND = "the paper's tables, read in a summary of them"


@dataclass(frozen=True)
class Figure:
    """One latency that somebody measured; ``pair`` names the target and the drafter."""

    gpu: str
    pair: str
    shape: str
    milliseconds: float
    source: str
    variant: str = ""

    @property
    def name(self) -> str:
        """What the row is called."""
        return ", ".join(filter(None, (self.gpu, self.pair, self.variant, self.shape)))

    @property
    def drafts(self) -> bool:
        """Whether a drafter took part."""
        return "drafter" in self.pair


def three(gpu: str, pair: str, figures: tuple[float, float, float], source: str, variant: str = "") -> list[Figure]:
    """Return the figures of the three regimes."""
    return [Figure(gpu, pair, shape, value, source, variant) for shape, value in zip(SHAPES, figures, strict=True)]


_H200 = "measured, vLLM 0.33, weights of no content, acceptance set to 5.0"
_OLDER = "measured, vLLM 0.26"
FIGURES = [
    *three("a10g", "BF16", (2582, 5441, 6576), "published leaderboard"),
    *three("a10g", PAIR, (232, 782, 2313), "published leaderboard", "window 1024"),
    Figure("ada", "BF16", "short", 2487, "published"),
    Figure("ada", "BF16", "long", 5692, SECOND_HAND),
    Figure("ada", "W4", "long", 2876, SECOND_HAND),
    Figure("ada", "BF16 + BF16 drafter", "long", 4285.7, "published"),
    Figure("ada", "BF16 + BF16 drafter", "long", 3218.8, "published", "window 2048"),
    Figure("ada", "W4 + BF16 drafter", "long", 2522, SECOND_HAND),
    Figure("ada", PAIR, "long", 2290.0, "published"),
    Figure("ada", PAIR, "long", 1966.0, "published", "window 2048"),
    *three("h200", "BF16", (503.8, 980.1, 1051.5), _H200),
    *three("h200", PAIR, (232.4, 393.1, 462.7), _H200),
    *three("h200", PAIR, (226.1, 393.0, 436.5), _H200, "again"),
    *three("h200", PAIR, (220.2, 366.2, 435.4), _H200, "once more"),
    *three("h200", "W4, INT4 head + W4 drafter", (232.8, 368.1, 419.0), _H200),
    *three("h200", "W4", (487, 945, 1034), _OLDER),
    *three("h200", "W4 + BF16 drafter", (268, 618, 572), f"{_OLDER}, acceptance not recorded"),
]


def measured(figure: Figure, found: dict[str, Model], accepted: float = ACCEPTED) -> Measured:
    """Return a figure as the model takes it; a drafter's window is the row's, on an H200 1,024."""
    target, _, drafter = figure.pair.partition(" + ")
    window = figure.variant.partition("window ")[2] or (1024 if figure.gpu == "h200" else 0)
    request = Request(*SHAPES[figure.shape], accepted if figure.drafts else 1.0)
    drafts = replace(found[drafter], window=int(window) or None) if drafter else None
    return Measured(request, found[target], drafts, figure.milliseconds / 1000)


def error(constants: Constants, gpu: Gpu, row: Measured) -> float:
    """Return (predicted − measured) / measured."""
    return predict(gpu, constants, row.request, row.target, row.drafter).seconds / row.seconds - 1


def calibrate(found: dict[str, Model]) -> Constants:
    """Return the shares fitted on two A10G rows, and the host's seconds fitted on three H200 rows."""
    by_name = {figure.name: measured(figure, found) for figure in FIGURES}
    shares = fit(A10G, *(by_name[name] for name in FITTED))
    assert shares is not None
    short, medium, pair = (by_name[name] for name in FITTED_HOST)
    step = (medium.seconds - short.seconds) / (medium.request.steps - short.request.steps)
    prefill = short.seconds - step * short.request.steps
    return replace(
        shares,
        host_prefill=prefill,
        host_step=step,
        host_draft_step=(pair.seconds - prefill) / pair.request.steps,
    )


def choices(found: dict[str, Model]) -> Iterator[tuple[float, str]]:
    """Yield, for every two A10G rows and acceptance length, the worst error of the other four, and which two."""
    for accepted in (LOW, ACCEPTED, HIGH):
        rows = {figure.name: measured(figure, found, accepted) for figure in FIGURES if figure.gpu == "a10g"}
        for one, other in itertools.combinations(rows, 2):
            constants = fit(A10G, rows[one], rows[other])
            if constants:
                others = [row for name, row in rows.items() if name not in (one, other)]
                yield max(abs(error(constants, A10G, row)) for row in others), f"{one} and {other} at {accepted}"


def table(found: dict[str, Model], constants: Constants) -> list[dict[str, Any]]:
    """Return the study's rows."""
    rows = []
    for figure in FIGURES:
        gpu = GPUS[figure.gpu]
        row = measured(figure, found)
        predicted = predict(gpu, constants, row.request, row.target, row.drafter)
        said = [f"{figure.milliseconds:g} ms {figure.source}", f"predicted {1000 * predicted.seconds:.0f}"]
        if figure.drafts and figure.gpu != "h200":
            bounds = (error(constants, gpu, measured(figure, found, accepted)) for accepted in (LOW, HIGH))
            said.append("at acceptance 4.9 and 5.1: {:+.3f} and {:+.3f}".format(*bounds))
            said.append(f"no error at {implied(figure, found, constants):.2f}")
        if figure.name in (*FITTED, *FITTED_HOST):
            said.append("fitted")
        rows.append(
            study.row(
                figure.name,
                "relative_error",
                round(predicted.seconds / row.seconds - 1, 6),
                "share",
                note="; ".join(said),
            )
        )
    rows += transferred(found, constants)
    for name, (target, drafter) in STEPS.items():
        window = replace(found[drafter], window=1024) if drafter else None
        for part, size in step_bytes(found[target], CONTEXT, window).items():
            rows.append(study.row(name, part, size / 1e9, "GB a step", note=f"{CONTEXT:,} tokens of context"))
    return rows + levers(found, constants)


def implied(figure: Figure, found: dict[str, Model], constants: Constants) -> float:
    """Return the acceptance length at which a figure would be predicted without error."""
    row = measured(figure, found)
    predicted = predict(GPUS[figure.gpu], constants, row.request, row.target, row.drafter)
    return implied_acceptance(row.seconds, predicted, row.request)


def transferred(found: dict[str, Model], constants: Constants) -> list[dict[str, Any]]:
    """Return the other Ada rows again, at the acceptance length that the BF16 pair's row implies."""
    metric = "relative_error_given_acceptance"
    rows = []
    pairs = [figure for figure in FIGURES if figure.gpu == "ada" and figure.drafts]
    for base in (figure for figure in pairs if figure.pair == "BF16 + BF16 drafter"):
        accepted = implied(base, found, constants)
        note = f"at {accepted:.2f}, the acceptance that the BF16 pair's row implies"
        for figure in pairs:
            if figure.variant == base.variant and figure is not base:
                missed = error(constants, RTX_5000_ADA, measured(figure, found, accepted))
                rows.append(study.row(figure.name, metric, missed, "share", note=note))
    return rows


def levers(found: dict[str, Model], constants: Constants) -> list[dict[str, Any]]:
    """Return what each change of the A10G pair is predicted to give, the mean over the three regimes."""
    target, drafter = found["W4"], replace(found["W4 drafter"], window=1024)
    changes = {
        "INT8 head": (replace(target, head=target.head // 2 + 2 * target.head_parameters // 128), ACCEPTED),
        "INT4 head": (found["W4, INT4 head"], ACCEPTED),
        "recurrent states in BF16": (replace(target, state=target.state // 2), ACCEPTED),
        "INT4 head and states in BF16": (replace(found["W4, INT4 head"], state=target.state // 2), ACCEPTED),
        "acceptance 5.5": (target, 5.5),
        "acceptance 6.0": (target, 6.0),
    }
    rows = []
    for name, (changed, accepted) in changes.items():
        gains = []
        for shape in SHAPES.values():
            before = predict(A10G, constants, Request(*shape, ACCEPTED), target, drafter)
            after = predict(A10G, constants, Request(*shape, accepted), changed, drafter)
            gains.append(before.seconds / after.seconds)
        note = "; ".join(f"{shape} {gain:.2f}" for shape, gain in zip(SHAPES, gains, strict=True))
        rows.append(study.row(f"a10g pair, {name}", "predicted_speed_up", statistics.mean(gains), "ratio", note=note))
    return rows


def about(found: dict[str, Model], constants: Constants) -> str:
    """Return what a reader of the page must know first."""
    rows = {figure.name: (figure, measured(figure, found)) for figure in FIGURES}
    errors = {
        name: error(constants, GPUS[figure.gpu], row)
        for name, (figure, row) in rows.items()
        if name not in (*FITTED, *FITTED_HOST)
    }
    alone = [one for name, one in errors.items() if not rows[name][0].drafts]
    host = [one for name, one in errors.items() if name.startswith("h200") and "BF16 drafter" not in name]
    inside = sum(abs(one) <= 0.2 for one in errors.values())
    worst, chosen = min(choices(found))
    _, short = rows[f"a10g, {PAIR}, window 1024, short"]
    peak = predict(A10G, Constants(1.0, 1.0), replace(short.request, accepted=HIGH), short.target, short.drafter)
    a10g = ", ".join(f"{implied(one, found, constants):.1f}" for one in FIGURES if one.gpu == "a10g" and one.drafts)
    ada = [implied(one, found, constants) for one in FIGURES if one.pair == "BF16 + BF16 drafter"]
    pair = step_bytes(found["W4"], CONTEXT, replace(found["W4 drafter"], window=1024))
    moved = sum(pair.values())
    share = {part: f"{size / moved:.0%}" for part, size in pair.items()}
    heads = f"{(pair['target head'] + pair['drafter head']) / moved:.0%}"
    floor = constants.host_draft_step * constants.memory * A10G.bandwidth
    paragraphs = (
        f"""The model is `components/measure/cost.py`; relative_error is (predicted − measured) / measured. Fitted: the
        shares that are reached of an A10G's 600 GB/s ({constants.memory:.3f}) and 70 TFLOP/s
        ({constants.compute:.3f}), on its BF16 short and long rows, and carried over to the other GPUs (RTX 5000 Ada:
        576 GB/s, 261 TFLOP/s; H200: 4.8 TB/s, 989 TFLOP/s); the host's floors on three H200 rows
        ({1000 * constants.host_prefill:.0f} ms a prefill, {1000 * constants.host_step:.1f} ms a step,
        {1000 * constants.host_draft_step:.1f} ms a step with a drafter), carried over too. Assumed: BF16 KV cache,
        fp32 recurrent states of which a verification of 16 tokens writes all 16, no prefix cache, answers of full
        length, acceptance length 5.0 (4.9 and 5.1 in the notes).""",
        f"""**{inside} of {len(errors)} predicted rows are within 20 %.** Without a drafter: all {len(alone)}, on three
        GPUs, the worst off by {max(map(abs, alone)):.3f}. On the H200 at a known acceptance length: all {len(host)},
        the worst off by {max(map(abs, host)):.3f}, but there the host's floors decide and bytes are not put to the
        test. **Of the published rows with a drafter only the A10G's long one is, and no other two A10G rows to fit on
        change that**: the best choice ({chosen}) misses one of the other four by {worst:.3f}.""",
        f"""The likely reason is the acceptance length of the prompts that were timed, which is not published. At 5.1
        an A10G that reached all of its 600 GB/s and 70 TFLOP/s would need {1000 * peak.seconds:.0f} ms where 232 were
        published; its rows imply {a10g} tokens a step at short, medium and long prompts (or answers that ended early).
        On the Ada the BF16 pair's own rows imply {ada[0]:.1f} at long prompts and {ada[1]:.1f} with the drafter's
        window; with these the other three follow within a tenth (relative_error_given_acceptance), since what differs
        between them is bytes. So the model compares weights, machines and prompt lengths at one acceptance length;
        milliseconds under a drafter need the acceptance length of the very prompts, and move in proportion to it.""",
        f"""**What to attack next.** A step of the pair moves {moved / 1e9:.2f} GB: {heads} are the output head, read
        twice, {share["target linears"]} the target's linears, {share["target state"]} the recurrent states, which
        verification multiplies, {share["drafter linears"]} the drafter's linears. First the head (predicted_speed_up),
        then the states. Below some {floor / 1e9:.1f} GB the host's floor, measured on another machine, would bound an
        A10G's step too; in the long regime most of what is left is prefill. On an H200 the host is the bound already:
        fewer bytes change nothing there.""",
    )
    return "\n\n".join(" ".join(text.split()) for text in paragraphs)


def main() -> int:
    """Write the study."""
    found = models()
    constants = calibrate(found)
    command = "python tests/benchmarks/cost_model.py"
    study.write("cost-model", command, {}, table(found, constants), about=about(found, constants))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
