"""What the fake API server keeps, and each verb on it."""

import copy
import re
import threading
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.kubernetes_api.fields import applied, merged, updated
from tests.kubernetes_api.refusal import Refused
from tests.kubernetes_api.resources import RESOURCES, Resource, faults
from tests.kubernetes_api.selectors import selected

Object = dict[str, Any]
Key = tuple[Resource, str, str]
NAMESPACE = "qdflash"
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
MERGE = ("application/merge-patch+json", "application/strategic-merge-patch+json")
APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True)
class Event:
    """A change: the object before and after it (None: not there), and its resource version."""

    version: int
    key: Key
    before: Object | None
    after: Object | None


@dataclass
class State:
    """Every object, and what a test sets: tokens' rights, installed groups, failures to come.

    ``rights`` maps a token to (account, its (group, resource, verb), or None for all); ``used`` collects what
    requests in a namespace took. Methods hold ``changed``, which is notified on every write; objects that they return
    are copies.
    """

    rights: dict[str, tuple[str, set[tuple[str, str, str]] | None]] = field(default_factory=dict)
    installed: set[str] = field(default_factory=lambda: {one.group for one in RESOURCES})
    used: set[tuple[str, str, str]] = field(default_factory=set)
    unavailable: int = 0
    objects: dict[Key, Object] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    logs: dict[tuple[str, str, str, bool], str] = field(default_factory=dict)
    forwards: dict[str, tuple[str, int]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))
    version: int = 1000
    forgotten: int = 0

    def forget(self) -> None:
        """Drop the history of changes, as a server does in time: older watches get 410."""
        with self.changed:
            self.events.clear()
            self.forgotten = self.version

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        with self.changed:
            if (resource, namespace, name) not in self.objects:
                raise Refused(404, f'{resource.named} "{name}" not found')
            return copy.deepcopy(self.objects[resource, namespace, name])

    def list(self, resource: Resource, namespace: str, labels: str = "", fields: str = "") -> list[Object]:
        with self.changed:
            return [
                copy.deepcopy(one)
                for (of, where, _), one in self.objects.items()
                if of == resource and namespace in ("", where) and selected(one, labels, fields)
            ]

    def create(self, resource: Resource, namespace: str, body: Object, manager: str, dry: bool = False) -> Object:
        with self.changed:
            one = self._checked(resource, namespace, body)
            name, metadata = one["metadata"]["name"], one["metadata"]
            if (resource, namespace, name) in self.objects:
                raise Refused(409, f'{resource.named} "{name}" already exists', "AlreadyExists")
            if resource.namespaced and not self._has_namespace(namespace):
                raise Refused(404, f'namespaces "{namespace}" not found')
            if "resourceVersion" in metadata:
                raise Refused(400, "resourceVersion should not be set on objects to be created")
            metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": _now(), "generation": 1}
            if resource.status and resource.kind not in ("Pod", "Node"):
                one.pop("status", None)  # tests make pods and nodes as a kubelet would have them
            if "managedFields" not in metadata:
                one = updated(None, one, manager, _now())
            return self._put((resource, namespace, name), one, dry)

    def replace(
        self, resource: Resource, namespace: str, body: Object, manager: str, status: bool = False, dry: bool = False
    ) -> Object:
        with self.changed:
            one = self._checked(resource, namespace, body)
            live = self.get(resource, namespace, one["metadata"]["name"])
            self._demand_current(resource, live, one)
            return self._written(resource, live, one, manager, status, dry)

    def patch(self, resource: Resource, namespace: str, name: str, body: Object, how: str, query: Object) -> Object:
        """Merge or apply ``body``; ``query`` is the request's: fieldManager, force, dryRun, and status for /status."""
        manager, dry, status = query["fieldManager"], "dryRun" in query, "status" in query
        with self.changed:
            live = self.objects.get((resource, namespace, name))
            if how == APPLY:
                one = self._checked(resource, namespace, body)
                if one["metadata"]["name"] != name:
                    raise Refused(400, f"the name of the object ({one['metadata']['name']}) is not that of the path")
                if live:
                    self._demand_current(resource, live, one)
                after = applied(live, one, manager, query.get("force") in ("true", "True"), _now())
                if live is None:
                    return self.create(resource, namespace, after, manager, dry)
                return self._written(resource, live, after, None, status, dry)
            if how not in MERGE or (how == MERGE[1] and (resource.custom or _has_list(body))):
                raise Refused(415, f"the body of the request was in an unknown format - {how}")
            if not isinstance(body, dict):
                raise Refused(400, "a merge patch is an object")
            live = self.get(resource, namespace, name)
            self._demand_current(resource, live, body)
            return self._written(resource, live, merged(live, body), manager, status, dry)

    def delete(self, resource: Resource, namespace: str, name: str, options: Object) -> Object:
        """Mark an object with finalizers, remove one without; then what it owns, by propagationPolicy."""
        with self.changed:
            live = self.get(resource, namespace, name)
            for field_, given in (options.get("preconditions") or {}).items():
                if live["metadata"][field_] != given:
                    raise Refused(409, f"the {field_} in the precondition ({given}) is not the object's")
            policy = options.get("propagationPolicy") or "Background"
            if policy not in ("Background", "Foreground", "Orphan"):
                raise Refused(422, f"propagationPolicy: Unsupported value: {policy}")
            self._dismiss((resource, namespace, name), policy)
            return live

    def _dismiss(self, key: Key, policy: str = "Background") -> None:
        live = copy.deepcopy(self.objects[key])
        if live["metadata"].get("finalizers"):
            if "deletionTimestamp" not in live["metadata"]:
                live["metadata"]["deletionTimestamp"] = _now()
                self._put(key, live)
            return
        before = self.objects.pop(key)
        self.version += 1
        gone = before | {"metadata": before["metadata"] | {"resourceVersion": str(self.version)}}
        self.events.append(Event(self.version, key, gone, None))
        self.changed.notify_all()
        uid = before["metadata"]["uid"]
        for other, one in list(self.objects.items()):
            left = [ref for ref in one["metadata"].get("ownerReferences", ()) if ref["uid"] != uid]
            if len(left) == len(one["metadata"].get("ownerReferences", ())) or other not in self.objects:
                continue
            if policy == "Orphan" or left:
                self._put(other, copy.deepcopy(one) | {"metadata": one["metadata"] | {"ownerReferences": left}})
            else:
                self._dismiss(other)

    def _written(
        self, resource: Resource, live: Object, given: Object, manager: str | None, status: bool, dry: bool
    ) -> Object:
        """Put what a write may change: the status alone through /status, all else through the object itself."""
        kept = copy.deepcopy(live)
        if status:
            after = kept | {"status": given.get("status", {})}
        else:
            identity = {"name", "namespace", "uid", "creationTimestamp", "generation", "deletionTimestamp"}
            metadata = {key: value for key, value in given["metadata"].items() if key not in identity}
            metadata |= {key: value for key, value in kept["metadata"].items() if key in identity}
            after = given | {"metadata": metadata}
            if resource.status:
                after = {key: value for key, value in after.items() if key != "status"}
                after |= {"status": live["status"]} if "status" in live else {}
            if _content(after) != _content(live):
                after["metadata"]["generation"] += 1
        if manager is not None:
            after = updated(live, after, manager, _now())
        same = _without_versions(after) == _without_versions(live)
        key = (resource, live["metadata"].get("namespace", ""), live["metadata"]["name"])
        if same:
            return copy.deepcopy(live)
        put = self._put(key, after, dry)
        if not dry and "deletionTimestamp" in put["metadata"] and not put["metadata"].get("finalizers"):
            self._dismiss(key)
        return put

    def _put(self, key: Key, one: Object, dry: bool = False) -> Object:
        without = {name: value for name, value in one["metadata"].items() if name != "managedFields"}
        if found := faults(one | {"metadata": without}):
            kind, name = one["kind"], one["metadata"]["name"]
            causes = [{"reason": "FieldValueInvalid", "message": fault} for fault in found]
            raise Refused(422, f'{kind} "{name}" is invalid: {"; ".join(found)}', causes=causes)
        one = copy.deepcopy(one)
        if dry:
            return one
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        before, self.objects[key] = self.objects.get(key), one
        self.events.append(Event(self.version, key, before, one))
        self.changed.notify_all()
        return copy.deepcopy(one)

    def _checked(self, resource: Resource, namespace: str, body: Any) -> Object:
        """Return a copy of a body with its name and namespace. Raises :class:`Refused` when it is not of the path."""
        if not isinstance(body, dict) or not isinstance(body.get("metadata"), dict):
            raise Refused(400, "the body is no object with metadata")
        if (body.get("apiVersion"), body.get("kind")) != (resource.api_version, resource.kind):
            told = f"{body.get('apiVersion')}, Kind={body.get('kind')}"
            raise Refused(400, f"{told} does not match the path's {resource.api_version}, Kind={resource.kind}")
        one = {key: value for key, value in copy.deepcopy(body).items() if value is not None}
        metadata = one["metadata"] = {key: value for key, value in one["metadata"].items() if value is not None}
        if "name" not in metadata and "generateName" in metadata:
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        if not NAME.fullmatch(metadata.get("name") or ""):
            raise Refused(422, f"{resource.kind} metadata.name: Invalid value: {metadata.get('name')!r}")
        if resource.namespaced and metadata.setdefault("namespace", namespace) != namespace:
            raise Refused(400, f"the namespace of the object ({metadata['namespace']}) is not that of the request")
        return one

    def _demand_current(self, resource: Resource, live: Object, given: Object) -> None:
        for name in ("resourceVersion", "uid"):
            value = given.get("metadata", {}).get(name)
            if value not in (None, "", live["metadata"][name]):
                raise Refused(
                    409,
                    f'Operation cannot be fulfilled on {resource.named} "{live["metadata"]["name"]}": the object has '
                    f"been modified; please apply your changes to the latest version and try again",
                )

    def _has_namespace(self, name: str) -> bool:
        return any(one.kind == "Namespace" and name == key for one, _, key in self.objects)


def _content(one: Object) -> Object:
    return {key: value for key, value in one.items() if key not in ("metadata", "status")}


def _without_versions(one: Object) -> Object:
    entries = [entry | {"time": ""} for entry in one["metadata"].get("managedFields", ())]
    return one | {"metadata": one["metadata"] | {"managedFields": entries, "resourceVersion": ""}}


def _has_list(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, dict) and any(map(_has_list, value.values())))


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
