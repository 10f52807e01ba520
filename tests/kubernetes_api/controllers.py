"""A stand-in for controllers and kubelets: plays pods, logs and conditions of an object from a script.

A script is a generator over :class:`World` and the object: it writes what its controller would and yields seconds to
wait. It starts anew when the object's generation changes, and ends when the object goes. ``SCRIPTS`` below say how
TrainJobs and servers behave: at once, slow, failing, flapping.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from tests.kubernetes_api.refusal import Refused
from tests.kubernetes_api.resources import BY_KIND
from tests.kubernetes_api.server import Api

Object = dict[str, Any]
Script = Callable[["World", Object], Iterator[float]]
POD = BY_KIND["v1", "Pod"]


class World:
    """What controllers write into the cluster."""

    def __init__(self, api: Api) -> None:
        self.state = api.state

    def status(self, one: Object, **fields: Any) -> None:
        """Merge fields into an object's status, observed at its generation."""
        resource, metadata = BY_KIND[one["apiVersion"], one["kind"]], one["metadata"]
        how, query = "application/merge-patch+json", {"fieldManager": "controller", "status": "yes"}
        body = {"status": fields}
        self.state.patch(resource, metadata.get("namespace", ""), metadata["name"], body, how, query)

    def conditions(self, one: Object, reason: str = "Scripted", message: str = "", **states: bool | None) -> None:
        """Replace conditions: True, False, or None for Unknown."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        found = [
            {
                "type": kind,
                "status": {True: "True", False: "False", None: "Unknown"}[value],
                "reason": reason,
                "message": message,
                "lastTransitionTime": now,
            }
            for kind, value in states.items()
        ]
        observed = {"observedGeneration": one["metadata"]["generation"]} if one["kind"] != "TrainJob" else {}
        self.status(one, conditions=found, **observed)

    def pod(self, owner: Object, name: str, labels: dict[str, str], spec: Object, status: Object) -> Object:
        """Make a pod that ``owner`` owns, or give one that there is another status."""
        namespace = owner["metadata"]["namespace"]
        with self.state.changed:
            if (POD, namespace, name) not in self.state.objects:
                reference = {key: owner[key] for key in ("apiVersion", "kind")}
                reference |= {key: owner["metadata"][key] for key in ("name", "uid")} | {"controller": True}
                metadata = {"name": name, "labels": labels, "ownerReferences": [reference]}
                body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}
                return self.state.create(POD, namespace, body, "kubelet")
            live = self.state.get(POD, namespace, name)
            return self.state.replace(POD, namespace, live | {"status": status}, "kubelet", status=True)

    def remove(self, owner: Object) -> None:
        """Delete the pods that ``owner`` owns."""
        for pod in self.pods(owner):
            self.state.delete(POD, pod["metadata"]["namespace"], pod["metadata"]["name"], {})

    def pods(self, owner: Object) -> list[Object]:
        uid = owner["metadata"]["uid"]
        found = self.state.list(POD, owner["metadata"]["namespace"])
        return [one for one in found if uid in [ref["uid"] for ref in one["metadata"].get("ownerReferences", ())]]

    def log(self, pod: Object, text: str, container: str | None = None, previous: bool = False) -> None:
        """Append to a container's log; ``previous`` is the one before its restart."""
        name = container or pod["spec"]["containers"][0]["name"]
        key = (pod["metadata"]["namespace"], pod["metadata"]["name"], name, previous)
        with self.state.changed:
            self.state.logs[key] = self.state.logs.get(key, "") + text
            self.state.changed.notify_all()


@contextmanager
def playing(api: Api, scripts: dict[str, Script]) -> Iterator[World]:
    """Play ``scripts``, by kind, on every object that is there or comes, each in a thread of its own."""
    world, stop = World(api), threading.Event()
    threads = [threading.Thread(target=_watch, args=(world, scripts, stop), daemon=True)]
    threads[0].start()
    try:
        yield world
    finally:
        stop.set()
        with api.state.changed:
            api.state.changed.notify_all()
        threads[0].join()


def _watch(world: World, scripts: dict[str, Script], stop: threading.Event) -> None:
    seen: dict[str, int] = {}
    while not stop.is_set():
        with world.state.changed:
            found = [one for key, one in world.state.objects.items() if key[0].kind in scripts]
            fresh = [one for one in found if seen.get(one["metadata"]["uid"]) != one["metadata"]["generation"]]
            if not fresh:
                world.state.changed.wait(0.5)
                continue
        for one in fresh:
            seen[one["metadata"]["uid"]] = one["metadata"]["generation"]
            script = scripts[one["kind"]](world, one)
            threading.Thread(target=_play, args=(world, one, script, stop), daemon=True).start()


def _play(world: World, one: Object, script: Iterator[float], stop: threading.Event) -> None:
    key = (BY_KIND[one["apiVersion"], one["kind"]], one["metadata"].get("namespace", ""), one["metadata"]["name"])
    while not stop.is_set():
        with world.state.changed:
            live = world.state.objects.get(key)
            if live is None or any(live["metadata"][of] != one["metadata"][of] for of in ("uid", "generation")):
                return
            try:
                seconds = next(script, None)
            except Refused as refused:
                if refused.code == 404:
                    return  # removed in between
                raise
        if seconds is None or stop.wait(seconds):
            return
