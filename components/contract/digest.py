"""Canonical JSON and the digests derived from it.

A stage's digest is the sha256 of the RFC 8785 form of {stage, version, config, inputs, salt}: it names the artifact
before anything runs. Config fields marked with :func:`runtime` do not change the result and stay out.
"""

import hashlib
from pathlib import Path
from typing import Any

import rfc8785
from pydantic import BaseModel, ConfigDict, Field

from components.contract.errors import UserError


class StageConfig(BaseModel):
    """Base of every stage's Config: unknown fields are errors, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def runtime(default: Any, description: str, **constraints: Any) -> Any:
    """Declare a config field that changes how a stage runs, never what it is asked for.

    Example: ``workers: int = runtime(2, "Tokenizer processes", ge=1)``.
    """
    return Field(default, description=description, json_schema_extra={"runtime": True}, **constraints)


def digested(config: BaseModel) -> dict[str, Any]:
    """Return ``config`` as JSON values without its runtime fields, nested models included."""
    result = {}
    for name, field in type(config).model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("runtime"):
            continue
        result[name] = _plain(getattr(config, name))
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return digested(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def stage_digest(
    stage: str, version: int, config: BaseModel, inputs: dict[str, list[str]], salt: str | None = None
) -> str:
    """Return the 64 hex digits that name a stage's artifact.

    ``inputs`` maps each port to the digests bound to it, in order. ``salt`` is set only for a forced re-run.
    Raises :class:`UserError` for a number that canonical JSON cannot hold (NaN, infinity, integers from 2^53).
    """
    document: Any = {"stage": stage, "version": version, "config": digested(config), "inputs": inputs, "salt": salt}
    try:
        return hashlib.sha256(rfc8785.dumps(document)).hexdigest()
    except rfc8785.CanonicalizationError as error:
        raise UserError(f"config of {stage}: {error}; numbers must be finite and integers below 2^53") from error


def file_sha256(path: Path) -> str:
    """Return the sha256 of one file's bytes, as hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
