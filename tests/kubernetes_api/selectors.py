"""Label and field selectors, as they stand in a query."""

import re
from typing import Any

from tests.kubernetes_api.refusal import Refused

_SET = re.compile(r"^(\S+) (in|notin) \(([^()]*)\)$")
_BOUNDARY = re.compile(r",(?![^()]*\))")


def selected(one: dict[str, Any], labels: str, fields: str) -> bool:
    """Say whether an object is meant. Raises :class:`Refused` for a selector that does not parse."""
    found = one["metadata"].get("labels") or {}
    wanted = [part.strip() for part in _BOUNDARY.split(labels) if part.strip()]
    held = [_holds(found, part) for part in wanted]  # every part is parsed, whatever the first one says
    return all(held) and _named(one, fields)


def _holds(labels: dict[str, str], part: str) -> bool:
    if match := _SET.match(part):
        key, operator, values = match[1], match[2], [one.strip() for one in match[3].split(",")]
        return (labels.get(key) in values) is (operator == "in")
    if match := re.match(r"^([^\s!=]+)\s*(==|=|!=)\s*([^\s!=]*)$", part):
        return (labels.get(match[1]) == match[3]) is (match[2] != "!=")
    if re.fullmatch(r"!?[\w./-]+", part):
        return (part.removeprefix("!") in labels) is not part.startswith("!")
    raise Refused(400, f"unable to parse requirement: {part}")


def _named(one: dict[str, Any], fields: str) -> bool:
    for part in filter(None, fields.split(",")):
        key, _, value = part.partition("=")
        if key not in ("metadata.name", "status.phase"):
            raise Refused(400, f'field label not supported: "{key}"')
        section, _, name = key.partition(".")
        if one.get(section, {}).get(name) != value.removeprefix("="):
            return False
    return True
