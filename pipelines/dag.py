"""The pipeline as plain data: a function from a recipe to its tasks, in dependency order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from components.contract.digest import StageConfig
from pipelines.recipe import TASKS, Recipe


@dataclass(frozen=True)
class LocalFile:
    """A plain file of this machine, bound to a port by its sha256."""

    path: Path


Source = str | LocalFile
"""What a port reads: the artifact of the task of that name, or a local file."""


@dataclass(frozen=True)
class Task:
    """One run of a stage.

    ``inputs`` maps each port to its sources, in order. A task that ``tolerates`` failures starts once the tasks it
    reads have ended, whatever their exit codes were.
    """

    name: str
    stage: str
    config: StageConfig
    inputs: dict[str, tuple[Source, ...]] = field(default_factory=dict)
    tolerates: bool = False


def build(recipe: Recipe) -> list[Task]:
    """Return the recipe's tasks; each reads only tasks before it."""
    tasks: list[Task] = []

    def add(name: str, tolerates: bool = False, **inputs: Source | Sequence[Source]) -> str:
        bound = {port: (given,) if isinstance(given, Source) else tuple(given) for port, given in inputs.items()}
        bound = {port: sources for port, sources in bound.items() if sources}
        tasks.append(Task(name, TASKS[name], recipe.configs[name], bound, tolerates))
        return name

    def files(names: list[str]) -> list[LocalFile]:
        return [LocalFile(recipe.file(name)) for name in names]

    # The teacher answers prompts a.
    teacher = add("teacher")
    prompts_eval = add("prompts_eval", files=files(recipe.files.prompts_eval))
    prompts_a = add("prompts_a", files=files(recipe.files.prompts_a), exclude=[prompts_eval])
    regen_a = add("regen_a", prompts=prompts_a, model=teacher)

    # Its answers train the INT4 target on a frozen grid.
    int4 = add("int4") if "int4" in recipe.configs else add("ptq", model=teacher, chats=regen_a)
    sequences = add("sequences", chats=regen_a, model=teacher)
    qad = add("qad", teacher=teacher, student=int4, sequences=sequences)
    select = add("select", qad=qad, student=int4, teacher=teacher, sequences=sequences)
    pack = add("pack", selected=select, student=int4, model=teacher)

    # A first drafter learns beside QAD; a second starts from it and learns from the packed target's own answers.
    drafter_1 = add("drafter_1", target=teacher, chats=regen_a)
    prompts_b = add("prompts_b", files=files(recipe.files.prompts_b), exclude=[prompts_eval, prompts_a])
    regen_b = add("regen_b", prompts=prompts_b, model=pack)
    drafter_2 = add("drafter_2", target=pack, chats=regen_b, init=drafter_1)
    gptq = add("gptq", drafter=drafter_2, target=pack, chats=regen_b)
    bundle = add("bundle", target=pack, drafter=gptq)

    # Three measurements on held-out prompts, each against the one before it.
    held_out = {"prompts": prompts_eval, "tasks": files(recipe.files.tasks)}
    baseline = add("measure_baseline", model=teacher, **held_out)
    target = add("measure_target", model=pack, baseline=baseline, **held_out)
    pair = add("measure_pair", model=bundle, baseline=target, chats=regen_b, **held_out)
    evidence = [qad, select, pack, drafter_1, drafter_2, gptq]
    gate = add("gate", measurements=[baseline, target, pair], stages=evidence)

    # The report reads everything that exists whether or not the gate is met; deployment needs a met gate.
    add("report", tolerates=True, stages=[task.name for task in tasks])
    add("deploy", bundle=bundle, verdict=gate)
    return tasks
