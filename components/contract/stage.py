"""What a stage module declares, and how it is found.

``components/<stage>/stage.py`` defines

- ``ROLE``: ``"core"``, ``"train"`` or ``"vllm"``: which environment or image runs it;
- ``VERSION``: an integer, raised whenever the same config and inputs would give another output;
- ``INPUTS``: port name to :class:`Port`;
- ``OUTPUTS``: file (or pattern) to one line of documentation;
- ``Config``: a :class:`~components.contract.digest.StageConfig`;
- ``run(config, inputs, output) -> metrics``: the work; heavy imports live inside it;
- optionally ``PAGE``: the file of ``OUTPUTS`` that Kubeflow's UI shows, beside the metric ``figures`` (name: number);
- optionally ``MEMOISED = False`` (runs every time) and ``check(metrics)``, called after the commit and also when the
  artifact was already there; it may raise :class:`~components.contract.errors.GateError`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from components.contract.digest import StageConfig

STAGES = (
    "model",
    "prompts",
    "regen",
    "ptq",
    "sequences",
    "qad",
    "select",
    "pack",
    "drafter",
    "gptq",
    "bundle",
    "measure",
    "gate",
    "deploy",
    "report",
)


@dataclass(frozen=True)
class Port:
    """One named input of a stage. ``many`` ports take any number of artifacts, in order."""

    doc: str
    optional: bool = False
    many: bool = False


class Stage(Protocol):
    """The shape of a ``stage.py`` module."""

    ROLE: str
    VERSION: int
    INPUTS: dict[str, Port]
    OUTPUTS: dict[str, str]
    Config: type[StageConfig]
    run: Callable[..., dict[str, Any]]


def load(stage: str) -> Stage:
    """Import a stage's declaration (cheap: no torch, no vllm)."""
    module: Any = importlib.import_module(f"components.{stage}.stage")
    return module
