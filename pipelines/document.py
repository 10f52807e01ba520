"""A recipe as plain data: read from YAML, overridden field by field, not yet validated."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from components.contract.errors import UserError


def read_document(path: Path) -> dict[str, Any]:
    """Return the mapping of sections in a YAML file; raises :class:`UserError` for anything else."""
    try:
        with path.open(encoding="utf-8") as file:  # given the open file, YAML names it in its errors
            data = yaml.load(file, _UniqueKeys)
    except OSError as error:
        raise UserError(f"recipe {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"recipe {path}: not YAML: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"recipe {path}: expected a mapping of sections")
    return data


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key given twice is an error rather than a silent overwrite."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def override(data: dict[str, Any], text: str) -> None:
    """Set one field in ``data``: ``path.to.field=value``, the value in YAML."""
    address, separator, value = text.partition("=")
    *parents, field = address.strip().split(".")
    if not separator or not field:
        raise UserError(f"--set {text}: expected path.to.field=value")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise UserError(f"--set {text}: {parent} holds a value, not fields")
    try:
        data[field] = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"--set {text}: the value is not YAML") from error


def hiding(data: dict[str, Any], text: str, shared: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """Return the tasks that hide an override of the section they share, when all of them give that field themselves.

    ``shared`` maps a stage to the tasks that inherit from its section.
    """
    stage, *path = text.partition("=")[0].strip().split(".")
    tasks = shared.get(stage, ())
    return tasks if path and all(_gives(data.get(task), path) for task in tasks) else ()


def _gives(section: Any, path: list[str]) -> bool:
    """Say whether a section has a value at ``path``, or above it one that is no mapping."""
    for name in path:
        if not isinstance(section, dict):
            return section is not None
        if name not in section:
            return False
        section = section[name]
    return not isinstance(section, dict)


def unusable(value: Any, place: str = "") -> Iterator[str]:
    """Yield the places of texts with a NUL or a lone surrogate."""
    if isinstance(value, str) and any(one == "\0" or "\ud800" <= one <= "\udfff" for one in value):
        yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in items:
        yield from unusable(one, f"{place}.{name}".lstrip("."))


def merge(below: Any, above: Any) -> Any:
    """Lay ``above`` over ``below``, mapping by mapping."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return {**below, **{key: merge(below.get(key), value) for key, value in above.items()}}
