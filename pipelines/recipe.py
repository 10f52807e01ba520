"""The recipe file: one YAML from which every stage's config follows.

A recipe has one section per task of the DAG (``qad``, ``regen_a``, …). Tasks that share a stage also share a section
of the stage's name (``regen`` below ``regen_a`` and ``regen_b``); the task's own section wins field by field. The one
``template`` section reaches every stage that renders conversations. Paths under ``files`` are relative to the recipe.
A recipe never names a store, an endpoint or a credential.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.chats.template import Template
from components.contract.digest import StageConfig
from components.contract.errors import UserError
from components.contract.faults import explain, unknown
from components.contract.stage import STAGES, load
from components.gate.rules import Rule
from pipelines import drafters
from pipelines.cluster import Cluster, locked_images
from pipelines.document import hiding, merge, override, read_document, unusable

TASKS: dict[str, str] = {
    "teacher": "model",
    "int4": "model",
    "prompts_a": "prompts",
    "prompts_b": "prompts",
    "prompts_eval": "prompts",
    "regen_a": "regen",
    "regen_b": "regen",
    "ptq": "ptq",
    "sequences": "sequences",
    "qad": "qad",
    "select": "select",
    "pack": "pack",
    "drafter_1": "drafter",
    "drafter_2": "drafter",
    "gptq": "gptq",
    "measure_window": "measure",
    "bundle": "bundle",
    "measure_baseline": "measure",
    "measure_target": "measure",
    "measure_pair": "measure",
    "gate": "gate",
    "deploy": "deploy",
    "report": "report",
}
"""Task to stage: the sections a recipe may have.

``int4`` takes the place of ``ptq``, and ``measure_window`` comes in, when a recipe has a section of that name.
"""

SHARED: dict[str, tuple[str, ...]] = {
    "prompts": ("prompts_a", "prompts_b", "prompts_eval"),
    "regen": ("regen_a", "regen_b"),
    "drafter": ("drafter_1", "drafter_2"),
    "measure": ("measure_baseline", "measure_target", "measure_pair", "measure_window"),
}
"""Stage to the tasks that inherit from its shared section."""

MEASUREMENTS = SHARED["measure"]
INEXACT = "VLLM_MARLIN_INPUT_DTYPE"
"""The one variable of a server that changes answers."""
EVIDENCE = ("qad", "select", "pack", "drafter_1", "drafter_2", "gptq")
"""The tasks beside the measurements whose metrics a gate's rules may name."""

_ROLE_RESOURCES = {"core": (1, 1.0), "train": (2, 5.0), "vllm": (2, 6.0)}
_LATER = ("report", "deploy")
_FILLED = "the pipeline fills this in"
_OURS = {"template": "give the recipe's one template section instead"}


SECTIONS = ("name", "template", "files", *SHARED, *TASKS, "resources", "cluster")
NAME = r"(?=.{1,57}$)[a-z0-9]+([.-][a-z0-9]+)*"  # and six more characters: an Argo Workflow's, 63 at most


class Strict(BaseModel):
    """A part of a recipe: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TemplateSection(Template):
    """How conversations become tokens, for every stage and for the served endpoint alike."""

    chat_template: str | None = Field(
        None,
        description="Jinja file, relative to the recipe, in place of the teacher's own chat template; the target has "
        "it too, and its endpoint",
    )


class Files(Strict):
    """Plain files of this machine, relative to the recipe; they enter digests by sha256."""

    prompts: list[str] = Field([], description="JSONL prompt files of each prompts task that names none of its own")
    prompts_a: list[str] = Field([], description="JSONL prompt files of prompts_a")
    prompts_b: list[str] = Field([], description="JSONL prompt files of prompts_b")
    prompts_eval: list[str] = Field([], description="JSONL prompt files of prompts_eval, the held-out prompts")
    manifests: dict[str, str] = Field({}, description="Manifest of ids by prompts task: it draws from these alone")
    tasks: list[str] = Field(
        [],
        description="Quality task files of every measurement; prompts that are trained on do not overlap with them",
    )
    selection: list[str] = Field(
        [],
        description="sciq.jsonl, boolq.jsonl, piqa.jsonl, hellaswag.jsonl: select goes by the accuracy on them; "
        "prompts that are trained on do not overlap with them either",
    )

    def of_prompts(self, task: str) -> list[str]:
        """Return the prompt files of one prompts task."""
        return getattr(self, task) or self.prompts

    def manifest_of(self, task: str) -> list[str]:
        """Return the manifest of one prompts task, in a list; empty when it has none."""
        return [self.manifests[task]] if task in self.manifests else []


class Resources(Strict):
    """What the local engine reserves for one task."""

    cpu: int = Field(1, description="CPU cores", ge=1)
    memory_gb: float = Field(1.0, description="Memory, GB", gt=0)


@dataclass(frozen=True)
class Recipe:
    """A validated recipe.

    ``configs`` holds one resolved config per task that this recipe has (``ptq`` or ``int4``, never both);
    ``resources`` holds the local engine's share per task.
    """

    name: str
    path: Path
    template: TemplateSection
    files: Files
    configs: dict[str, StageConfig]
    resources: dict[str, Resources]
    cluster: Cluster

    def file(self, name: str) -> Path:
        """Return the absolute path of a file that the recipe names."""
        return (self.path.parent / name).resolve()

    def share_prompts(self, one: str, other: str) -> bool:
        """Say whether two prompts tasks draw from the same splits or files, at least in part."""
        first, second = self.configs[one].dataset, self.configs[other].dataset  # type: ignore[attr-defined]
        if first and second:
            return first.id == second.id and not set(first.splits).isdisjoint(second.splits)
        return not set(self.files.of_prompts(one)).isdisjoint(self.files.of_prompts(other))


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe and apply ``path.to.field=value`` overrides (values are YAML).

    Raises :class:`UserError` naming every wrong field with its path, in one line.
    """
    path, data = Path(path), read_document(Path(path))
    for one in overrides:
        override(data, one)
        if hidden := hiding(data, one, SHARED):
            raise UserError(f"--set {one}: {', '.join(hidden)} each give it themselves; set it there")
    try:
        return _resolve(data, path)
    except RecursionError as error:
        raise UserError(f"recipe {path}: a section contains itself") from error
    except _Faults as faults:
        raise UserError(f"recipe {path}: {faults}") from faults


class _Faults(Exception):
    """Wrong fields, one phrase each."""

    def __str__(self) -> str:
        return "; ".join(self.args)


def _resolve(data: dict[str, Any], path: Path) -> Recipe:
    """Validate every section; raise :class:`_Faults` with all that is wrong."""
    faults: list[str] = []

    def section(model: type[BaseModel], name: str, values: Any) -> Any:
        try:
            return model.model_validate({} if values is None else values)
        except ValidationError as error:
            faults.extend(explain(error, model, name))
            return None

    faults.extend(unknown(str(name), str(name), SECTIONS) for name in data if name not in SECTIONS)
    faults.extend(f"{place}: holds a character that no file name or argument can" for place in unusable(data))
    if not isinstance(data.get("name"), str) or not re.fullmatch(NAME, data["name"]):
        faults.append(f"name: must match {NAME}; it names the recipe in the store and in reports")
    if "int4" in data and "ptq" in data:
        faults.append("int4, ptq: give one of the two, an INT4 checkpoint or how to make one")
    faults.extend(
        f"{name}: expected a mapping of fields" for name in SHARED if not isinstance(data.get(name) or {}, dict)
    )
    template = section(TemplateSection, "template", data.get("template"))
    files = section(Files, "files", data.get("files"))
    cluster = section(Cluster, "cluster", merge({"images": locked_images()}, data.get("cluster") or {}))
    absent = {"ptq" if "int4" in data else "int4"} | {"measure_window"} - set(data)
    tasks = [task for task in TASKS if task not in absent]
    configs = {}
    for task in tasks:
        stage = TASKS[task]
        given = data.get(task)
        if task in SHARED.get(stage, ()):
            given = merge(data.get(stage) or {}, given or {})
        ours = filled(str(data.get("name")), task, tasks, template or TemplateSection(), cluster or Cluster())
        if isinstance(given or {}, dict):
            faults.extend(f"{task}.{name}: {_OURS.get(name, _FILLED)}" for name in ours if name in (given or {}))
            given = {**(given or {}), **ours}
        configs[task] = section(load(stage).Config, task, given)
    faults = [_as_written(fault, data) for fault in faults]
    if files:
        faults.extend(_prompt_sources(configs, files))
    faults.extend(_profile(configs))
    faults.extend(_window(configs))
    faults.extend(drafters.faults(configs))
    if not faults and (rule := _window_rule(configs)):
        configs["gate"] = configs["gate"].model_copy(update={"rules": [*configs["gate"].rules, rule]})
    resources = _resources(data.get("resources") or {}, tasks, section, faults)
    placed = cluster.tasks if cluster else {}
    faults.extend(unknown(f"cluster.tasks.{name}", name, tasks) for name in placed if name not in tasks)
    faults.extend(cluster.faults(TASKS, configs) if cluster else ())
    if faults:
        raise _Faults(*dict.fromkeys(faults))
    return Recipe(data["name"], path.resolve(), template, files, configs, resources, cluster)


def _prompt_sources(configs: dict[str, Any], files: Files) -> list[str]:
    """Demand that each prompts task has one source, a data set or files."""
    faults = []
    for task in SHARED["prompts"]:
        config = configs[task]
        if config and bool(config.dataset) == bool(files.of_prompts(task)):
            many = "give one of the two" if config.dataset else "one of the two says where prompts come from"
            faults.append(f"{task}.dataset, files.{task}: {many}")
    known = SHARED["prompts"]
    faults.extend(unknown(f"files.manifests.{name}", name, known) for name in files.manifests if name not in known)
    return faults


def _profile(configs: dict[str, Any]) -> list[str]:
    """Demand that what deploy, the last task, serves is a profile of the bundle, and was measured as inexact as it."""
    deploy, bundle, measured = configs["deploy"], configs["bundle"], configs["measure_pair"]
    if not deploy or not bundle or not measured:
        return []
    served = bundle.serving.profiles.get(deploy.profile)
    if served is None:
        known = ", ".join(bundle.serving.profiles)
        return [f"deploy.profile: {deploy.profile} is no profile of bundle.serving ({known})"]
    if served.env.get(INEXACT) == measured.profile.env.get(INEXACT):
        return []
    place = f"bundle.serving.profiles.{deploy.profile}.env.{INEXACT}"
    return [f"{place}: changes answers, so what is measured needs it too; set measure.profile.env.{INEXACT} alike"]


def _window(configs: dict[str, Any]) -> list[str]:
    """Demand that a window is compared with full attention before it is served, and that the task for it has some."""
    bundle, drafter, measured = configs["bundle"], configs["drafter_2"], configs.get("measure_window")
    if "measure_window" not in configs and bundle and bundle.window == "auto":
        return ["bundle.window: auto goes by what measure_window finds; give measure_window.windows"]
    if measured and not measured.windows:
        return ["measure_window.windows: give the windows to compare with full attention, in tokens"]
    if not bundle or not drafter or (measured is None and "measure_window" in configs):
        return []
    window, compared = _served_window(configs), measured.windows if measured else ()
    if window is None or window in compared:
        return []
    place = "drafter.window" if bundle.window == "trained" else "bundle.window"
    found = f"has {', '.join(map(str, compared))}" if compared else "is not there"
    return [f"{place}: {window} is served only after a comparison with full attention; measure_window.windows {found}"]


def _served_window(configs: dict[str, Any]) -> int | None:
    """Return the window that the bundle serves, in tokens; None for full attention, and for auto, which keeps it."""
    window = configs["bundle"].window
    if window == "trained":
        window = configs["drafter_2"].window
    return None if window == "auto" else window


def _window_rule(configs: dict[str, Any]) -> Rule | None:
    """Return the gate's rule that refuses a window which loses acceptance."""
    window = _served_window(configs)
    if window is None:
        return None
    metric = f"measure_window.window.by_window.{window}.keeps"
    return Rule(name="the window keeps the acceptance of full attention", metric=metric, at_least=1)


def filled(recipe: str, task: str, tasks: Iterable[str], template: Template, cluster: Cluster) -> dict[str, Any]:
    """Return the config fields that the pipeline gives to a task of a recipe; its own section may not."""
    config = load(TASKS[task]).Config
    fields: dict[str, Any] = {}
    if "template" in config.model_fields:
        fields["template"] = Template(thinking=template.thinking)
    if task == "deploy" and cluster.images.vllm:
        fields["image"] = cluster.images.vllm
    if task == "gate":
        fields["names"] = [*(name for name in MEASUREMENTS if name in tasks), *EVIDENCE]
    if task == "report":
        fields |= {"title": recipe, "names": [name for name in tasks if name not in _LATER]}
    if task in MEASUREMENTS:
        pair = task == "measure_pair"
        fields |= {"label": task.removeprefix("measure_"), "draft": pair, "parity": pair}
    return fields


def _as_written(fault: str, data: dict[str, Any]) -> str:
    """Name a fault of an inherited field by the shared section that holds it."""
    task, _, rest = fault.partition(".")
    stage = TASKS.get(task, "")
    field = re.split(r"[.:]", rest, maxsplit=1)[0]
    shared, own = data.get(stage), data.get(task)
    inherited = task in SHARED.get(stage, ()) and isinstance(shared, dict) and field in shared
    if inherited and not (isinstance(own, dict) and field in own):
        return f"{stage}.{rest}"
    return fault


def _resources(given: Any, tasks: list[str], section: Any, faults: list[str]) -> dict[str, Resources]:
    """Default by role, then the stage's entry, then the task's."""
    if not isinstance(given, dict):
        faults.append("resources: expected a mapping of stage or task to cpu and memory_gb")
        return {}
    known = {*TASKS, *STAGES}
    faults.extend(unknown(f"resources.{name}", str(name), known) for name in given if name not in known)
    found = {}
    for task in tasks:
        stage = TASKS[task]
        cpu, memory_gb = _ROLE_RESOURCES[load(stage).ROLE]
        values = merge({"cpu": cpu, "memory_gb": memory_gb}, given.get(stage) or {})
        values = merge(values, given.get(task) or {})
        found[task] = section(Resources, f"resources.{task if task in given else stage}", values)
    return found
