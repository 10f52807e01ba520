"""What was deployed, revision by revision: a ConfigMap beside the service, without any secret in it."""

import json
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from components.contract.errors import TransientError, UserError
from pipelines.deployment.api import Namespace, Object

KEPT = 5
STARTED, DEPLOYED, FAILED, REPLACED = "started", "deployed", "failed", "replaced"


@dataclass(frozen=True)
class Revision:
    """One deployment: its number, bundle and objects, the operator's values, and how it went."""

    number: int
    bundle: str
    objects: list[Object]
    values: dict[str, Any]
    state: str
    at: str
    said: str = ""


class Record:
    """The revisions of one name, oldest first."""

    def __init__(self, namespace: Namespace, name: str) -> None:
        self._namespace, self._name = namespace, f"{name}-revisions"
        self._found = namespace.get("v1", "ConfigMap", self._name)
        try:
            text = self._found["data"]["revisions"] if self._found else "[]"
            self.revisions = [Revision(**one) for one in json.loads(text)]
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"ConfigMap {self._name}: not as qdflash deploy writes it; delete it, and what it made by its labels"
            ) from error

    @property
    def deployed(self) -> Revision | None:
        """The revision that serves, as far as the record knows."""
        return next((one for one in reversed(self.revisions) if one.state == DEPLOYED), None)

    @property
    def previous(self) -> Revision | None:
        """The one that served before."""
        return next((one for one in reversed(self.revisions) if one.state == REPLACED), None)

    @property
    def standing(self) -> list[Object]:
        """Every object that may be in the namespace: of what serves, and of deploys that did not end."""
        return [
            one for revision in self.revisions if revision.state in (STARTED, DEPLOYED) for one in revision.objects
        ]

    def begin(self, bundle: str, objects: list[Object], values: dict[str, Any]) -> Revision:
        """Add a revision before its objects are applied."""
        number = self.revisions[-1].number + 1 if self.revisions else 1
        made = Revision(number, bundle, objects, values, STARTED, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        self._write([*self.revisions, made])
        return made

    def end(self, revision: Revision, state: str, said: str = "") -> None:
        """Say how a revision went; a deployed one replaces the one before, and others that did not end have failed."""
        after = []
        for one in self.revisions:
            if one.number == revision.number:
                one = replace(one, state=state, said=said)
            elif one.state == STARTED:
                one = replace(one, state=FAILED, said="interrupted")
            elif one.state == DEPLOYED and state == DEPLOYED:
                one = replace(one, state=REPLACED)
            after.append(one)
        self._write(after)

    def remove(self) -> None:
        """Forget every revision."""
        self._namespace.delete("v1", "ConfigMap", self._name)

    def _write(self, revisions: list[Revision]) -> None:
        """Keep the last ones, and of those before them the last that served and the last that serves."""
        last, older = revisions[-KEPT:], revisions[:-KEPT]
        lacking = {DEPLOYED, REPLACED} - {one.state for one in last}
        kept = {one.state: one for one in older if one.state in lacking}
        self.revisions = sorted([*kept.values(), *last], key=lambda one: one.number)
        text = json.dumps([asdict(one) for one in self.revisions])
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": self._name}, "data": {"revisions": text}}
        if self._found is None:
            self._found = self._namespace.create(body)
        else:
            self._found = self._namespace.replace(self._found | {"data": body["data"]})
        if self._found is None:
            raise TransientError(f"ConfigMap {self._name}: written by another one meanwhile; try again")
