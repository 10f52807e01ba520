"""A stage as a KFP container component. Imports kfp: only the stages' ``component.py`` may import this module."""

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

from kfp import dsl

from components.contract.context import is_stored_file
from components.contract.stage import load

_SHOWN = {"page": dsl.HTML, "metrics": dsl.Metrics}


def container_component(
    stage: str, image: str, argv: Sequence[str], name: str | None = None, edges: bool = True
) -> Any:
    """Return the KFP component that runs ``argv`` (see :mod:`components.contract.invocation`) in ``image``.

    Its inputs are artifacts, one for each artifact that ``argv`` binds, named by :func:`artifact_inputs`; they draw
    the edges, while ``argv`` carries the addresses. Its outputs are those of :mod:`components.contract.executor`.
    ``name`` is the task's name, the stage's when not given; without ``edges`` the component has no inputs, for a task
    that must run although one it reads has failed.
    """
    ports = artifact_inputs(argv) if edges else {}
    outputs = {"artifact": dsl.Artifact, **(_SHOWN if hasattr(load(stage), "PAGE") else {})}

    def task(*bound: Any) -> dsl.ContainerSpec:
        executor = ["--executor-output", dsl.PIPELINE_TASK_EXECUTOR_OUTPUT_PATH_PLACEHOLDER]
        for output, made in zip(outputs, bound[len(ports) :], strict=True):
            executor += ["--executor-artifact", output, made.path, made.uri]
        return dsl.ContainerSpec(image=image, command=["python"], args=[*argv, *executor])

    task.__name__ = name or stage
    task.__doc__ = f"Run the {stage} stage; see components/{stage}/README.md."
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(port, keyword, annotation=dsl.Input[dsl.Artifact]) for port in ports]
    parameters += [inspect.Parameter(made, keyword, annotation=dsl.Output[kind]) for made, kind in outputs.items()]
    task.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return dsl.container_component(task)


def artifact_inputs(argv: Sequence[str]) -> dict[str, str]:
    """Map each artifact input's name to the address that ``argv`` binds to it; plain files are none.

    A port bound once keeps its name; one bound several times becomes ``port_0``, ``port_1``, …
    """
    pairs = [after.partition("=")[::2] for flag, after in itertools.pairwise(argv) if flag == "--input"]
    bound: dict[str, list[str]] = {}
    for port, uri in pairs:
        if not is_stored_file(uri):
            bound.setdefault(port, []).append(uri)
    named = {}
    for port, uris in bound.items():
        for index, uri in enumerate(uris):
            named[port if len(uris) == 1 else f"{port}_{index}"] = uri
    return named
