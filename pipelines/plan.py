"""The plan: per task its argv, digest, dependencies and state, before anything starts.

Everything that executes or renders the pipeline reads a :class:`Plan` and nothing else.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from components.store.backend import Store
from pipelines.cluster import Cluster
from pipelines.recipe import Recipe

State = Literal["cached", "run", "blocked", "skipped"]


@dataclass(frozen=True)
class Selection:
    """Which tasks may run, by task or stage name. Neither field given: all.

    ``only`` runs those tasks; ``start`` (``--from``) runs those and all that depend on them.
    """

    only: tuple[str, ...] = ()
    start: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedTask:
    """One task of a plan.

    ``argv`` follows the interpreter (``["-m", "components.qad", …]``). ``needs`` must have succeeded before the task
    starts; ``soft_needs`` must have ended, whatever their exit codes. ``state``: ``cached`` (committed already),
    ``run``, ``blocked`` (selected but cannot run; ``why`` says what is missing), ``skipped`` (not selected and not
    committed). ``files_to_upload`` are (local file, store key) pairs that must be in the store before it starts.
    """

    name: str
    stage: str
    role: str
    argv: tuple[str, ...]
    needs: tuple[str, ...]
    soft_needs: tuple[str, ...]
    cpu: int
    memory_gb: float
    digest: str
    uri: str
    state: State
    why: str
    files_to_upload: tuple[tuple[Path, str], ...]


@dataclass(frozen=True)
class Plan:
    """The tasks of one recipe on one store, in dependency order."""

    recipe: str
    store: str
    tasks: tuple[PlannedTask, ...]
    cluster: Cluster

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, for ``qdflash plan --json``."""
        raise NotImplementedError


def make_plan(recipe: Recipe, store: Store, selection: Selection = Selection()) -> Plan:  # noqa: B008
    """Decide what would run. Reads the store, writes nothing.

    Raises :class:`UserError` for a selection that names no task.
    """
    raise NotImplementedError


def force(recipe: Recipe, store: Store, names: Iterable[str]) -> None:
    """Record a new salt for each named task or stage (``--force``): it and everything below gets a new digest."""
    raise NotImplementedError


def unforce(recipe: Recipe, store: Store, names: Iterable[str]) -> None:
    """Forget the salts of the named tasks or stages (``--unforce``)."""
    raise NotImplementedError


def render_table(plan: Plan) -> Any:
    """Return a rich table of the plan for people."""
    raise NotImplementedError
