"""Wrong fields of a config or a recipe, in words."""

import difflib
from collections.abc import Iterable

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, model: type[BaseModel], *section: str) -> list[str]:
    """Return one phrase per wrong field of ``model``: its path below ``section`` and what is wrong with it."""
    phrases = []
    for fault in error.errors():
        place = ".".join(map(str, (*section, *fault["loc"]))) or "config"
        if fault["type"] == "extra_forbidden":
            names = model.model_fields if len(fault["loc"]) == 1 else {}
            phrases.append(unknown(place, str(fault["loc"][-1]), names))
        elif fault["type"] == "model_type":
            phrases.append(f"{place}: expected a mapping of fields")
        else:
            phrases.append(f"{place}: {fault['msg']}")
    return phrases


def unknown(place: str, name: str, known: Iterable[str]) -> str:
    """Return the phrase for a name that is none of ``known``, with the closest of them."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"{place}: unknown field" + (f", did you mean {close[0]}?" if close else "")
