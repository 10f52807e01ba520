"""The pods of a TrainJob: how each ended, and the log of the first."""

import contextlib
import sys
import threading
from collections.abc import Iterator

import kubernetes
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from components.contract.errors import BUG, DONE, TRANSIENT, TransientError
from pipelines.deployment.api import Namespace, Object
from pipelines.trainjob.spec import NODE

RETRY_SECONDS = 2.0
_DRAIN_SECONDS = 30.0
_SILENCE_SECONDS = 60.0
_INDEX = "batch.kubernetes.io/job-completion-index"


def labels(job: str) -> str:
    """Return the selector of a TrainJob's pods."""
    return f"jobset.sigs.k8s.io/jobset-name={job},jobset.sigs.k8s.io/replicatedjob-name={NODE}"


def number(pod: Object) -> str:
    """Return which node a pod is, from 0."""
    return str(pod["metadata"]["labels"].get(_INDEX, "?"))


class Seen:
    """What was seen of a TrainJob's pods: those of a failed one are removed while its end is being told."""

    def __init__(self, namespace: Namespace, job: str) -> None:
        self._namespace, self._labels = namespace, labels(job)
        self._pods: dict[str, Object] = {}

    def pods(self) -> list[Object]:
        """Return the pods that are there now."""
        return self._namespace.pods(self._labels)

    def look(self) -> None:
        """Remember the pods as they are now."""
        self._pods |= {pod["metadata"]["uid"]: pod for pod in self.pods()}

    def verdict(self) -> tuple[int, Object | None]:
        """Return a failed TrainJob's exit code, and the pod that it comes from.

        A process's own words count most, unless it only lost another; then what may succeed when it is tried again: a
        pod that was lost or ended by a signal, or is not there at all; last an exit code without words.
        """
        found = [(pod, *_exit(pod)) for pod in self._pods.values()]
        own = [(code, pod) for pod, code, spoken in found if spoken and code != TRANSIENT]
        again = [(code, pod) for pod, code, _ in found if code == TRANSIENT]
        mute = [(code, pod) for pod, code, spoken in found if not spoken and code not in (DONE, TRANSIENT)]
        return next(iter(own or again or mute), (TRANSIENT, None))


def _exit(pod: Object) -> tuple[int, bool]:
    """Return a pod's exit code (75 for a pod that was lost, 0 while it runs), and whether its processes told it."""
    status = pod.get("status", {})
    mine = [one.get("state", {}) for one in status.get("containerStatuses", ()) if one["name"] == NODE]
    ended = mine[0].get("terminated") if mine else None
    words = (ended or {}).get("message", "").split()
    codes = [int(word) for word in words if word.isdigit()]
    if codes:
        return next((code for code in codes if code != TRANSIENT), TRANSIENT), True
    disrupted = any(
        one["type"] == "DisruptionTarget" and one["status"] == "True" for one in status.get("conditions", ())
    )
    if disrupted or (ended is None and status.get("phase") == "Failed"):
        return TRANSIENT, False
    code = ended["exitCode"] if ended else DONE
    return (TRANSIENT if code > 128 else min(code, BUG)), False


@contextlib.contextmanager
def streaming(job: str, namespace: str) -> Iterator[None]:
    """Print the log of a TrainJob's node 0 while the block runs, and at its end what is left of it."""
    over = threading.Event()
    thread = threading.Thread(target=_stream, args=(job, namespace, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
    thread.join(_DRAIN_SECONDS)


def _stream(job: str, namespace: str, over: threading.Event) -> None:
    """Follow one pod after the other; a connection that is lost or silent is made anew, behind what was told."""
    core, told = kubernetes.client.CoreV1Api(), dict[str, int]()
    while True:
        ending = over.is_set()
        with contextlib.suppress(ApiException, HTTPError, TransientError):
            pods = core.list_namespaced_pod(namespace, label_selector=f"{labels(job)},{_INDEX}=0").items
            for pod in sorted(pods, key=lambda pod: pod.metadata.creation_timestamp):
                _tell(core, pod.metadata.name, namespace, told, follow=not ending)
        if ending:
            return
        over.wait(RETRY_SECONDS)


def _tell(core: kubernetes.client.CoreV1Api, pod: str, namespace: str, told: dict[str, int], follow: bool) -> None:
    answer = core.read_namespaced_pod_log(
        pod, namespace, container=NODE, follow=follow, _preload_content=False, _request_timeout=_SILENCE_SECONDS
    )
    with contextlib.closing(answer):
        rest, count = b"", 0
        for chunk in answer.stream():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                count += 1
                if count > told.get(pod, 0):
                    print(line.decode(errors="replace"), file=sys.stderr, flush=True)
                    told[pod] = count
