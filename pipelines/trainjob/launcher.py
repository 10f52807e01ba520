"""Starts the TrainJob of one digest, or adopts the one that is there, and follows it to its end, however far that is.

Killed, it leaves the TrainJob to the next launcher of the same task; asked to end (SIGTERM), it deletes it. What the
nodes have put into the store stays either way, and the next TrainJob continues it.
"""

import os
import time
from collections.abc import Iterator

from components.contract.errors import TRANSIENT, StageError, TransientError
from components.contract.log import Log
from components.store.artifact import Artifact, read_manifest
from components.store.backend import Store
from pipelines.deployment.api import Namespace, Object
from pipelines.trainjob import nodes
from pipelines.trainjob.spec import POD

POLL_SECONDS = 5.0
API, KIND = "trainer.kubeflow.org/v1alpha1", "TrainJob"
_NAME_DIGITS = 16
_TAIL_LINES = 20


class JobError(StageError):
    """The TrainJob failed, with the exit code of the process that failed first for good."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Launcher:
    """One TrainJob: ``spec`` is its own, ``stage`` and ``digest`` name it and what it commits to ``store``."""

    def __init__(self, namespace: Namespace, store: Store, stage: str, digest: str, spec: Object, log: Log) -> None:
        self._namespace, self._store, self._stage, self._digest = namespace, store, stage, digest
        self._spec, self._log = spec, log
        self.name = f"{stage}-{digest[:_NAME_DIGITS]}"
        self._seen = nodes.Seen(namespace, self.name)

    def run(self) -> Artifact:
        """Return what the TrainJob commits; it is gone then.

        Raises:
            JobError: it failed: with exit code 75 where trying again may succeed, else that of the stage.
            TransientError: Kubernetes or the store is away, or somebody deleted the TrainJob.
            UserError: Kubernetes refuses it.
        """
        if (artifact := self._committed()) is not None:
            self._log.event("cached", uri=artifact.uri)
            return artifact
        try:
            self._start()
            with nodes.streaming(self.name, self._namespace.name):
                failure = self._follow()
            artifact = self._committed()
            if failure is None and artifact is None:
                failure = JobError(f"TrainJob {self.name}: complete, but nothing is committed; see its log", 1)
            self._namespace.delete(API, KIND, self.name)
        except KeyboardInterrupt:
            self._namespace.delete(API, KIND, self.name)
            self._log.event("cancelled", trainjob=self.name)
            raise
        if artifact is None:
            assert failure is not None
            raise failure
        return artifact

    def _committed(self) -> Artifact | None:
        return read_manifest(self._store, self._stage, self._digest)

    def _start(self) -> None:
        """Make the TrainJob unless one is under way; one that has ended goes first."""
        wanted = {"apiVersion": API, "kind": KIND, "metadata": self._metadata(), "spec": self._spec}
        while True:
            found = self._namespace.get(API, KIND, self.name)
            if found is None and not self._seen.pods():
                if self._namespace.create(wanted) is not None:
                    self._log.event("created", trainjob=self.name, nodes=self._spec["trainer"]["numNodes"])
                    return
            elif found is not None and not _ended(found) and "deletionTimestamp" not in found["metadata"]:
                self._log.event("adopted", trainjob=self.name)
                return
            else:  # what is left of an earlier one, whose pods may still be training
                self._namespace.delete(API, KIND, self.name)
            time.sleep(POLL_SECONDS)

    def _metadata(self) -> Object:
        """Return name, labels and owner: what owns this pod, so that the job goes with the workflow, not the pod."""
        labels = {"app.kubernetes.io/part-of": "qdflash", "app.kubernetes.io/component": self._stage}
        pod = self._namespace.get("v1", "Pod", os.environ[POD]) if POD in os.environ else None
        owners = pod["metadata"].get("ownerReferences", ()) if pod else ()
        kept = [{key: one[key] for key in ("apiVersion", "kind", "name", "uid")} for one in owners]
        return {"name": self.name, "labels": labels} | ({"ownerReferences": kept} if kept else {})

    def _follow(self) -> JobError | None:
        """Block until the TrainJob has ended; return how it failed, or None."""
        told: tuple[str, ...] = ()
        while True:
            try:
                self._seen.look()
                found = self._namespace.get(API, KIND, self.name)
            except TransientError as error:
                self._log.event("waiting", why=str(error))
                time.sleep(POLL_SECONDS)
                continue
            if found is None:
                raise TransientError(f"TrainJob {self.name}: somebody deleted it; run again to continue")
            if told != (told := tuple(_states(found))):
                self._log.event("trainjob", name=self.name, state=", ".join(told) or "new")
            if ended := _ended(found):
                self._seen.look()
                return None if ended["type"] == "Complete" else self._failure(ended)
            time.sleep(POLL_SECONDS)

    def _failure(self, condition: Object) -> JobError:
        """Explain a failure by the last words of the pod that counts; if it is not the first node's, show its log."""
        code, pod = self._seen.verdict()
        why = condition.get("message") or condition.get("reason", "")
        if pod is not None:
            lines = self._namespace.log(pod["metadata"]["name"], "node", _TAIL_LINES).splitlines()
            if nodes.number(pod) != "0":
                print(*(f"node {nodes.number(pod)} | {line}" for line in lines), sep="\n", flush=True)
            said = [line.partition(" failed error=")[2] for line in lines if " failed error=" in line]
            why = f"node {nodes.number(pod)}: {(said or lines or [why])[-1]}"
        hint = "; run again to continue" if code == TRANSIENT else ""
        return JobError(f"TrainJob {self.name}: {why}{hint}", code)


def _ended(job: Object) -> Object | None:
    """Return the condition that says that a TrainJob is over."""
    conditions = job.get("status", {}).get("conditions", ())
    return next((one for one in conditions if one["type"] in ("Complete", "Failed") and one["status"] == "True"), None)


def _states(job: Object) -> Iterator[str]:
    for one in job.get("status", {}).get("conditions", ()):
        if one["status"] == "True":
            yield f"{one['type']} ({one['reason']})"
