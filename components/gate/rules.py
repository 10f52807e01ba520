"""One rule: a metric, and the number or other metric that bounds it."""

from typing import Any

from pydantic import Field, model_validator

from components.contract.digest import StageConfig

Evidence = dict[str, dict[str, Any]]


class Rule(StageConfig):
    """``metric`` must be at least, at most, above or below a number or ``times`` another metric.

    A metric is addressed as ``<task>.<key>.<key>…``, for example ``measure_pair.acceptance_length.low``.
    """

    name: str = Field(description="What the rule protects, in a few words")
    metric: str = Field(description="Address of the judged metric")
    at_least: float | str | None = Field(None, description="Lower bound, inclusive: a number or a metric's address")
    at_most: float | str | None = Field(None, description="Upper bound, inclusive")
    above: float | str | None = Field(None, description="Lower bound, exclusive")
    below: float | str | None = Field(None, description="Upper bound, exclusive")
    times: float = Field(1.0, description="Factor on the bound")
    needs: str | None = Field(
        None, description="Address of a flag; where it is false the rule has no power and gates nothing"
    )

    @model_validator(mode="after")
    def _one_bound(self) -> "Rule":
        if sum(bound is not None for bound in (self.at_least, self.at_most, self.above, self.below)) != 1:
            raise ValueError(f"rule {self.name!r}: give exactly one of at_least, at_most, above, below")
        return self

    @property
    def bound(self) -> tuple[str, float | str]:
        """The kind of bound and its operand."""
        for kind in ("at_least", "at_most", "above", "below"):
            operand = getattr(self, kind)
            if operand is not None:
                return kind, operand
        raise AssertionError("validated above")

    def paths(self) -> list[str]:
        """Every metric address that the rule reads."""
        operand = self.bound[1]
        return [path for path in (self.metric, operand, self.needs) if isinstance(path, str)]


def lookup(evidence: Evidence, path: str) -> Any:
    """Return the metric at ``task.key.key``, or None when any part of the way is missing."""
    value: Any = evidence
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return value


def judge(rule: Rule, evidence: Evidence) -> dict[str, Any]:
    """Return ``{name, metric, value, demand, status}`` with status pass, fail, missing or ``no power``."""
    kind, operand = rule.bound
    value = lookup(evidence, rule.metric)
    limit = lookup(evidence, operand) if isinstance(operand, str) else operand
    number, limit = _number(value), _number(limit)
    words = kind.replace("_", " ")
    demand = f"{words} {operand}" if rule.times == 1 else f"{words} {rule.times:g} × {operand}"
    if isinstance(operand, str) and limit is not None:
        demand += f" = {limit * rule.times:.6g}"
    finding = {"name": rule.name, "metric": rule.metric, "value": value, "demand": demand}
    if rule.needs is not None and lookup(evidence, rule.needs) is False:
        return {**finding, "status": "no power"}
    if number is None or limit is None:
        return {**finding, "status": "missing"}
    limit *= rule.times
    holds = {
        "at_least": number >= limit,
        "at_most": number <= limit,
        "above": number > limit,
        "below": number < limit,
    }[kind]
    return {**finding, "status": "pass" if holds else "fail"}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
