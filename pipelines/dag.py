"""The pipeline as plain data: a function from a recipe to its tasks, in dependency order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.contract.digest import StageConfig
from pipelines.recipe import EVIDENCE, MEASUREMENTS, TASKS, Recipe


@dataclass(frozen=True)
class LocalFile:
    """A plain file of this machine, bound to a port by its sha256."""

    path: Path


Source = str | LocalFile
"""What a port reads: the artifact of the task of that name, or a local file."""


@dataclass(frozen=True)
class Task:
    """One run of a stage.

    ``inputs`` maps each port to its sources, in order. The task starts once the tasks it reads have succeeded; those
    it ``tolerates`` only have to have ended.
    """

    name: str
    stage: str
    config: StageConfig
    inputs: dict[str, tuple[Source, ...]] = field(default_factory=dict)
    tolerates: tuple[str, ...] = ()


def _calibrates(ptq: Any) -> bool:
    """Say whether post-training quantisation reads chats: plain rounding need not wait for them."""
    return ptq.method != "rtn"


def build(recipe: Recipe) -> list[Task]:
    """Return the recipe's tasks; each reads only tasks before it."""
    tasks: list[Task] = []

    def add(name: str, tolerates: tuple[str, ...] = (), **inputs: Source | Sequence[Source]) -> str:
        bound = {port: (given,) if isinstance(given, Source) else tuple(given) for port, given in inputs.items()}
        bound = {port: sources for port, sources in bound.items() if sources}
        tasks.append(Task(name, TASKS[name], recipe.configs[name], bound, tolerates))
        return name

    def files(names: list[str]) -> list[LocalFile]:
        return [LocalFile(recipe.file(name)) for name in names]

    def prompts(name: str, earlier: Sequence[str], held_out: Sequence[Source]) -> str:
        return add(
            name,
            model="teacher",
            files=files(recipe.files.of_prompts(name)),
            manifest=files(recipe.files.manifest_of(name)),
            exclude=[one for one in earlier if recipe.share_prompts(name, one)],
            held_out=held_out,
        )

    # What is measured on or chosen by is set aside first; what is trained on overlaps with none of it.
    own_template = [recipe.template.chat_template] if recipe.template.chat_template else []
    teacher = add("teacher", chat_template=files(own_template))
    tasks_files = files(recipe.files.tasks)
    prompts_eval = prompts("prompts_eval", [], [])
    choice = files(recipe.files.selection)
    measured_on: list[Source] = [prompts_eval, *tasks_files, *choice]

    # The teacher answers prompts a.
    prompts_a = prompts("prompts_a", [prompts_eval], measured_on)
    regen_a = add("regen_a", prompts=prompts_a, model=teacher)

    # Its answers train the INT4 target on a frozen grid.
    if "int4" in recipe.configs:
        int4 = add("int4")
    else:
        int4 = add("ptq", model=teacher, chats=regen_a if _calibrates(recipe.configs["ptq"]) else ())
    sequences = add("sequences", chats=regen_a, model=teacher)
    qad = add("qad", teacher=teacher, student=int4, sequences=sequences)
    select = add("select", qad=qad, student=int4, teacher=teacher, sequences=sequences, tasks=choice)
    pack = add("pack", qad=qad, selected=select, student=int4, model=teacher, sequences=sequences)

    # A first drafter learns beside QAD; a second starts from it and learns from the packed target's own answers.
    drafter_1 = add("drafter_1", target=teacher, chats=regen_a)
    prompts_b = prompts("prompts_b", [prompts_eval, prompts_a], measured_on)
    regen_b = add("regen_b", prompts=prompts_b, model=pack)
    drafter_2 = add("drafter_2", target=pack, chats=regen_b, init=drafter_1)
    gptq = add("gptq", drafter=drafter_2, target=pack, chats=regen_b)

    # Windows are compared before the pair is put together, which may go by the result.
    if "measure_window" in recipe.configs:
        add("measure_window", model=pack, drafter=gptq, prompts=prompts_eval)
    window: Any = recipe.configs["bundle"]
    bundle = add("bundle", target=pack, drafter=gptq, windows="measure_window" if window.window == "auto" else ())

    # Three measurements on held-out prompts, each against the one before it.
    baseline = add("measure_baseline", model=teacher, prompts=prompts_eval, tasks=tasks_files)
    target = add("measure_target", model=pack, prompts=prompts_eval, tasks=tasks_files, baseline=baseline)
    add("measure_pair", model=bundle, prompts=prompts_eval, tasks=tasks_files, baseline=target, chats=regen_b)
    measured = [name for name in MEASUREMENTS if name in recipe.configs]
    gate = add("gate", measurements=measured, stages=EVIDENCE)

    # The report is written whether or not the gate is met; a deployment needs a met gate.
    reported = [name for name in recipe.configs if name not in ("report", "deploy")]
    add("report", stages=reported, tolerates=(gate,))
    add("deploy", bundle=bundle, verdict=gate)
    return tasks
