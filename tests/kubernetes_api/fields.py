"""Managed fields and server-side apply; a list counts as one field."""

import copy
from typing import Any

from tests.kubernetes_api.refusal import Refused

Path = tuple[str, ...]
SERVERS_OWN = frozenset(
    {"uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "deletionTimestamp"}
)
_ABSENT = object()


def leaves(one: dict[str, Any]) -> set[Path]:
    """Return the paths of an object's values, without its identity and what the server itself writes."""
    below = {(key, *rest) for key, value in one.items() for rest in _below(value)}
    identity = {("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace"), ("metadata",)}
    return {path for path in below - identity if not (path[0] == "metadata" and path[1] in SERVERS_OWN)}


def _below(value: Any) -> set[Path]:
    if not isinstance(value, dict) or not value:
        return {()}
    return {(key, *rest) for key, child in value.items() for rest in _below(child)}


def value_at(one: Any, path: Path) -> Any:
    for key in path:
        if not isinstance(one, dict) or key not in one:
            return _ABSENT
        one = one[key]
    return one


def merged(one: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return ``one`` under ``over``, as a JSON merge patch does it: null takes away."""
    result = dict(one)
    for key, value in over.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            below = result.get(key)
            result[key] = merged(below if isinstance(below, dict) else {}, value)
        else:
            result[key] = value
    return result


def owners(one: dict[str, Any]) -> dict[tuple[str, str], set[Path]]:
    """Return each manager's fields, by (manager, Apply or Update)."""
    entries = one["metadata"].get("managedFields", ())
    return {(entry["manager"], entry["operation"]): _paths(entry["fieldsV1"]) for entry in entries}


def with_owners(one: dict[str, Any], held: dict[tuple[str, str], set[Path]], now: str) -> dict[str, Any]:
    """Return ``one`` with its managed fields set."""
    entries = [
        {
            "manager": manager,
            "operation": operation,
            "apiVersion": one["apiVersion"],
            "time": now,
            "fieldsType": "FieldsV1",
            "fieldsV1": _tree(paths),
        }
        for (manager, operation), paths in held.items()
        if paths
    ]
    return one | {"metadata": one["metadata"] | {"managedFields": entries}}


def updated(before: dict[str, Any] | None, after: dict[str, Any], manager: str, now: str) -> dict[str, Any]:
    """Give ``manager`` the fields that a create, update or patch changed, and take them from the others."""
    held, me = owners(before) if before else {}, (manager, "Update")
    changed = {path for path in leaves(after) if value_at(before, path) != value_at(after, path)}
    gone = (leaves(before) if before else set()) - leaves(after)
    held = {who: paths - changed - gone for who, paths in held.items()}
    held[me] = held.get(me, set()) | changed
    return with_owners(after, held, now)


def applied(live: dict[str, Any] | None, given: dict[str, Any], manager: str, force: bool, now: str) -> dict[str, Any]:
    """Return the object after ``manager`` applied ``given``.

    Raises :class:`Refused` (409, naming the manager) when another one owns a field with another value.
    """
    me, wanted = (manager, "Apply"), leaves(given)
    held = owners(live) if live else {}
    conflicts = {
        path: who[0]
        for who, paths in held.items()
        if who != me
        for path in paths
        if path in wanted and value_at(live, path) != value_at(given, path)
    }
    if conflicts and not force:
        causes = [
            {"reason": "FieldManagerConflict", "message": f'conflict with "{who}"', "field": "." + ".".join(path)}
            for path, who in sorted(conflicts.items())
        ]
        told = "; ".join(f"{one['message']}: {one['field']}" for one in causes)
        raise Refused(409, f"Apply failed with {len(causes)} conflict(s): {told}", causes=causes)
    result = copy.deepcopy(live) if live else {}
    others = set().union(*(paths for who, paths in held.items() if who != me))
    for path in held.get(me, set()) - wanted - others:
        _remove(result, path)
    held = {who: paths - conflicts.keys() for who, paths in held.items()}
    held[me] = wanted
    return with_owners(merged(result, given), held, now)


def _remove(one: dict[str, Any], path: Path) -> None:
    """Take a value away, and what is empty without it."""
    if len(path) > 1:
        below = one.get(path[0])
        if isinstance(below, dict):
            _remove(below, path[1:])
            if not below:
                del one[path[0]]
    else:
        one.pop(path[0], None)


def _tree(paths: set[Path]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path in sorted(paths):
        node = tree
        for key in path:
            node = node.setdefault(f"f:{key}", {})
    return tree


def _paths(tree: dict[str, Any]) -> set[Path]:
    found = {(key[2:], *rest) for key, below in tree.items() for rest in (_paths(below) if below else {()})}
    return found or {()}
