"""Study ``window``: a served drafter's attention window, at short and at long prompts, with nothing retrained.

Goes on with the work folder of ``gptq_acceptance.py`` once its GPTQ drafter is there: ``python
tests/benchmarks/window.py SIZE serve --model FOLDER --work FOLDER`` (vLLM) serves that drafter with full attention and
with each window, ``… replay`` (training) computes the same drafts with this project's own forward pass, and ``…
table`` writes docs/results/window.*.
"""

import json
from pathlib import Path
from typing import Any

import gptq_acceptance
import served_pairs
import study
from gptq_acceptance import Size
from steps import Steps

from components.bundle.window import with_window
from components.chats.rows import Row
from components.contract.context import Input
from components.measure import acceptance
from components.serving.profiles import Profile

ALL = "none"


def variants(size: Size) -> dict[str, int | None]:
    """Return the windows by their names."""
    return {ALL: None, **{str(window): window for window in size.windows}}


def drafters(steps: Steps, size: Size, work: Path) -> dict[str, Path]:
    """Return the GPTQ drafter's folder with each window."""
    source, found = Input(steps["gptq"].uri).path, {}
    for name, window in variants(size).items():
        found[name] = work / "windows" / name
        if not (found[name] / "config.json").exists():
            with_window(source, found[name], window)
    return found


def serve(steps: Steps, size: Size, model: Path, work: Path) -> None:
    """Ask the target with every window; rows go to ``windows.jsonl``."""
    target = Input(steps["target"].uri).path
    pairs = {name: served_pairs.Pair(target, draft) for name, draft in drafters(steps, size, work).items()}
    asked = gptq_acceptance.prompts(steps, size, model)
    profile = Profile(**size.profile, max_num_seqs=1)
    served_pairs.measure(pairs, asked, profile, size.tokens, size.at_once, work / "windows.jsonl")


def replay(steps: Steps, size: Size, work: Path) -> None:
    """Draft along every served answer with this project's own forward; rows go to ``replayed.jsonl``."""
    import torch

    from components.checkpoint.load import load_model
    from components.drafter import forward, model
    from components.drafter.blocks import lay_out
    from components.drafter.features import TargetFeatures
    from components.gptq.folder import read
    from components.training.parallel import Ranks

    dtype = getattr(torch, size.profile["dtype"])
    target = load_model(Input(steps["target"].uri).path, dtype).to(Ranks().device)  # type: ignore[arg-type]
    served = served_pairs.read(work / "windows.jsonl")
    (work / "replayed.jsonl").unlink(missing_ok=True)
    for name, folder in drafters(steps, size, work).items():
        drafter = read(folder, target)
        features = TargetFeatures(target, model.taps_of(drafter))
        for row in (row for row in served if row["variant"] == name):
            ids, start = torch.tensor(row["prompt_token_ids"] + row["token_ids"]), len(row["prompt_token_ids"])
            blocks = lay_out([(ids, torch.arange(start, len(ids) - 1))], drafter.block_size).to(drafter.device)
            wanted, inside = blocks.labels()
            with torch.no_grad(), torch.autocast(drafter.device.type, dtype, enabled=dtype != torch.float32):
                right = (forward.predictions(drafter, features(ids), blocks) == wanted) & inside
            lengths = right.int().cumprod(1).sum(1).tolist()
            steps_taken, at = [], 0
            while at < len(lengths):
                steps_taken.append(lengths[at])
                at += lengths[at] + 1
            accepted = [sum(one > slot for one in steps_taken) for slot in range(drafter.block_size - 1)]
            with (work / "replayed.jsonl").open("a") as lines:
                kept = {key: row[key] for key in ("variant", "regime", "id", "category")}
                lines.write(json.dumps({**kept, "drafts": len(steps_taken), "accepted": accepted}) + "\n")
        print(name, "replayed", flush=True)


def table(size: Size, work: Path) -> list[Row]:
    """Return the study's rows."""
    rows: list[Row] = []
    served, replayed = (served_pairs.read(work / name) for name in ("windows.jsonl", "replayed.jsonl"))

    def add(variant: str, metric: str, unit: str, found: dict[str, Any], note: str = "") -> None:
        figures = {key: found[key] for key in ("value", "n", "low", "high")}
        rows.append(study.row(variant, metric, unit=unit, note=note, **figures))

    for kind in ("short", "long"):
        base = [row for row in served if row["variant"] == ALL and row["regime"] == kind]
        for name in variants(size):
            mine, own = (
                [row for row in rows_of if row["variant"] == name and row["regime"] == kind]
                for rows_of in (served, replayed)
            )
            variant = f"window {name}, {kind} prompts"
            if not mine:
                rows.append(study.row(variant, "acceptance_length", None, "tokens", 0, note="no server answered"))
                continue
            found = acceptance.summarise(mine, 0)
            add(variant, "acceptance_length", "tokens", found, f"vLLM's counters, {found['drafts']} drafts")
            add(variant, "latency_ms", "ms", served_pairs.latency_ms(mine))
            add(variant, "step_ms", "ms", served_pairs.step_ms(mine))
            if own:
                add(variant, "own_forward_acceptance_length", "tokens", acceptance.summarise(own, 0), "same answers")
            if name != ALL and base:
                for metric, statistic in (
                    ("acceptance_ratio_to_none", served_pairs.acceptance_ratio),
                    ("latency_ratio_to_none", served_pairs.latency_ratio),
                ):
                    add(variant, metric, "", served_pairs.paired(mine, base, statistic), "paired")
    return rows


def about(steps: Steps, size: Size, work: Path) -> str:
    """Return what a reader of the page must know first."""
    served = served_pairs.read(work / "windows.jsonl")
    said = []
    for kind in ("short", "long"):
        if many := [len(row["prompt_token_ids"]) for row in served if row["regime"] == kind]:
            said.append(f"{kind} prompts have {min(many)} to {max(many)} tokens")
    return (
        "COMMAND is `serve`, `replay` and `table`, after the steps of gptq-acceptance: its W4A16 target, its GPTQ "
        "drafter (trained with full attention) and its prompts; only the window in the drafter's config differs. The "
        f"{', the '.join(said)}; up to {size.tokens} tokens an answer, one request at a time, all servers in turn. "
        "Where no sequence is longer than the window, nothing is cut off, and what differs from window none is the "
        "kernel's path and the cache's layout. own_forward_acceptance_length drafts along the same answers with this "
        "project's own forward pass under the same window: a served figure below it would be a fault of serving. "
        "latency_ratio_to_none is all requests' time over that without a window."
    )


def main() -> int:
    """Run from the command line."""
    arguments, steps, size = gptq_acceptance.command_line(__doc__, ("serve", "replay", "table"))
    work = arguments.work
    if arguments.command == "serve":
        serve(steps, size, arguments.model, work)
    elif arguments.command == "replay":
        replay(steps, size, work)
    else:
        study.write(
            "window",
            f"python tests/benchmarks/window.py {arguments.size} COMMAND --model FOLDER --work FOLDER",
            gptq_acceptance.versions(steps),
            table(size, work),
            about=about(steps, size, work),
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
