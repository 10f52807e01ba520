"""The gate: rules over the metrics of earlier tasks, one verdict."""

import json
from typing import Any

from pydantic import Field, model_validator

from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig
from components.contract.errors import GateError, UserError
from components.contract.stage import Port
from components.gate.rules import Rule, judge

ROLE = "core"
VERSION = 1
INPUTS = {
    "measurements": Port("the measure artifacts that the rules name", many=True),
    "stages": Port("other artifacts whose metrics the rules name", many=True, optional=True),
}
OUTPUTS = {"verdict.json": "passed, and each rule's value, bound and status"}


class Config(StageConfig):
    """Which metrics are judged, and how."""

    names: list[str] = Field(description="Task names of the inputs: measurements first, then stages, in order")
    rules: list[Rule] = Field(description="Every rule must hold; a metric that is missing does not hold", min_length=1)

    @model_validator(mode="after")
    def _rules_name_known_tasks(self) -> "Config":
        for rule in self.rules:
            for path in rule.paths():
                if path.split(".")[0] not in self.names:
                    raise ValueError(f"rule {rule.name!r}: {path} names no task of {', '.join(self.names)}")
        return self


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Judge every rule and write ``verdict.json``. Metrics: ``passed``, ``failed`` (names), ``rules``."""
    bound = inputs.all("measurements") + inputs.all("stages")
    if len(bound) != len(config.names):
        raise UserError(f"gate: {len(config.names)} names for {len(bound)} inputs; they must match in order")
    evidence = {name: one.metrics for name, one in zip(config.names, bound, strict=True)}
    findings = [judge(rule, evidence) for rule in config.rules]
    failed = [finding["name"] for finding in findings if finding["status"] in ("fail", "missing")]
    for finding in findings:
        output.log.event("rule", **finding)
    verdict = {"passed": not failed, "failed": failed, "rules": findings}
    (output.path / "verdict.json").write_text(json.dumps(verdict, indent=1))
    return verdict


def check(metrics: dict[str, Any]) -> None:
    """Raise :class:`GateError` naming each rule that does not hold, with its value and bound."""
    if metrics["passed"]:
        return
    faults = [
        f"{rule['name']}: {rule['metric']} is {_told(rule['value'])}, must be {rule['demand']}"
        for rule in metrics["rules"]
        if rule["name"] in metrics["failed"]
    ]
    raise GateError("gate not met: " + "; ".join(faults))


def _told(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
