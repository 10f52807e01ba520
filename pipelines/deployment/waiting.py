"""Wait for the pods of a deployment, saying why they are not ready."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from components.contract.errors import TransientError, UserError, is_shortage, one_line
from pipelines.deployment.api import Namespace, Object
from pipelines.deployment.chart import LABEL, pod_labels

POLL_SECONDS = 3.0
TAIL_LINES = 200
PATIENCE = 2
_ERROR = re.compile(r"error|exception|denied|refused|no such|not found|mismatch|cannot", re.IGNORECASE)
_ECHO = re.compile(r"root cause above|engine core initialization failed", re.IGNORECASE)  # of an error further up
_OVER = ("Failed", "Succeeded")  # what an eviction leaves in the list
_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


@dataclass(frozen=True)
class Reason:
    """Why a pod is not ready; ``final`` when waiting will not help."""

    text: str
    final: bool = False


def wait(
    namespace: Namespace, objects: list[Object], seconds: float, say: Callable[[str], None], tick: Callable[[], None]
) -> Object:
    """Block until every replica of this deployment is ready and no other pod is left; return a ready pod.

    ``say`` gets each new reason, ``tick`` is called at every look. Raises :class:`UserError` for what waiting cannot
    mend, :class:`TransientError` when the time is over; both end with the last reason.
    """
    wanted = objects[-1]["spec"].get("replicas") or objects[-1]["spec"].get("predictor", {}).get("minReplicas") or 1
    deadline, told = time.monotonic() + seconds, ""
    while True:
        tick()
        try:
            ready, reason = _look(namespace, objects, wanted)
        except TransientError as error:  # the API server was restarted, say
            ready, reason = None, Reason(one_line(error))
        if ready:
            return ready
        if reason.text != told:
            say(reason.text)
            told = reason.text
        if reason.final:
            raise UserError(reason.text)
        if time.monotonic() > deadline:
            raise TransientError(f"not ready after {seconds / 60:.0f} minutes: {reason.text}")
        time.sleep(POLL_SECONDS)


def _look(namespace: Namespace, objects: list[Object], wanted: int) -> tuple[Object | None, Reason]:
    """Return a ready pod once all ``wanted`` are ready and no other is left; until then why they are not."""
    server, labels = objects[-1], pod_labels(objects)
    mine = labels.pop(LABEL)
    pods = namespace.pods(",".join(f"{key}={value}" for key, value in labels.items()))
    own = [one for one in pods if one["metadata"]["labels"].get(LABEL) == mine]
    others = sum(one not in own and one.get("status", {}).get("phase") not in _OVER for one in pods)
    ready = [one for one in own if is_ready(one)]
    if len(ready) >= wanted and not others and is_ready(_live(namespace, server)):
        return ready[0], Reason("ready")
    reasons = [reason for pod in own for reason in reasons_of(namespace, pod)]
    return None, reasons[0] if reasons else Reason(_of_server(namespace, server, others))


def standing(namespace: Namespace, objects: list[Object]) -> dict[str, str]:
    """Return the pods of a deployment by name: ready, or why not."""
    selector = ",".join(f"{key}={value}" for key, value in pod_labels(objects).items())
    found = {}
    for pod in namespace.pods(selector):
        reasons = [reason.text for reason in reasons_of(namespace, pod)]
        found[pod["metadata"]["name"]] = "ready" if is_ready(pod) else (reasons or ["starting"])[0]
    return found


def reasons_of(namespace: Namespace, pod: Object) -> Iterator[Reason]:
    """Yield why a pod is not ready, what matters most first."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    if status.get("phase") == "Failed":
        yield Reason(f"{name}: {status.get('reason', 'failed')} ({status.get('message', '')})")
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            yield Reason(f"{name}: no node takes it ({condition.get('message', '')})")
    for one in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        state, container = one.get("state", {}), one["name"]
        waiting = state.get("waiting", {}).get("reason", "")
        what = "fetching the bundle" if container in ("storage-initializer", "weights") else "vLLM"
        if waiting in _PULL:
            said = state["waiting"].get("message", "")
            yield Reason(
                f"{name}: image of {container} is not pulled, {waiting} ({said})", waiting == "InvalidImageName"
            )
        elif waiting == "CreateContainerConfigError":
            yield Reason(
                f"{name}: {container} is not made ({state['waiting'].get('message', '')}): a Secret or its key"
            )
        elif not one.get("ready"):
            ended = state.get("terminated") or one.get("lastState", {}).get("terminated")
            if ended and (ended["exitCode"] or waiting == "CrashLoopBackOff"):
                yield _of_crash(namespace, name, container, what, ended, one.get("restartCount", 0))


def _of_crash(namespace: Namespace, pod: str, container: str, what: str, ended: Object, restarts: int) -> Reason:
    """Explain a container that ended, with its own last words; twice the same is no accident."""
    log = namespace.log(pod, container, TAIL_LINES, previous=True) or namespace.log(pod, container, TAIL_LINES)
    lines = [line.strip() for line in log.splitlines() if line.strip() and not _ECHO.search(line)]
    of_gpu = [line for line in lines if "CUDA out of memory" in line or (is_shortage(line) and "GPU" in line)]
    words = (of_gpu or [line for line in lines if _ERROR.search(line)] or lines or ["no log"])[-1][:300]
    final = restarts >= PATIENCE
    if ended.get("reason") == "OOMKilled":
        why = "out of memory (RAM, not the GPU's): raise resources.limits.memory"
    elif of_gpu:
        why = (
            "CUDA out of memory: another process holds the GPU, or gpu_memory_utilization or max_model_len is too high"
        )
    elif what != "vLLM":
        why = "its store address, key, role or network policy"
    else:
        why = f"exit code {ended['exitCode']}"
    times = f", {restarts} restarts" if restarts else ""
    return Reason(f"{pod}: {what} ended ({why}{times}): {words}", final)


def _live(namespace: Namespace, server: Object) -> Object:
    return namespace.get(server["apiVersion"], server["kind"], server["metadata"]["name"]) or {}


def is_ready(one: Object) -> bool:
    """Say whether a pod, an InferenceService or a Deployment is ready, at the generation that was applied."""
    status, generation = one.get("status", {}), one.get("metadata", {}).get("generation", 0)
    if one.get("kind") in ("InferenceService", "Deployment") and status.get("observedGeneration", 0) < generation:
        return False
    kind = "Available" if one.get("kind") == "Deployment" else "Ready"
    found = [condition["status"] for condition in status.get("conditions", ()) if condition["type"] == kind]
    return found == ["True"] and "deletionTimestamp" not in one.get("metadata", {})


def _of_server(namespace: Namespace, server: Object, others: int) -> str:
    """Say what is waited for when no pod gives a reason."""
    if others:
        return f"{others} pods of the revision before are still there"
    live, name = _live(namespace, server), server["metadata"]["name"]
    kserve = server["kind"] == "InferenceService"
    pods = namespace.get("apps/v1", "Deployment", f"{name}-predictor") if kserve else live
    refused = [one for one in _conditions(pods or {}) if one["type"] == "ReplicaFailure" and one["status"] == "True"]
    lacking = [one for one in _conditions(live) if one["status"] != "True"]
    said = [one["message"] for one in (*refused, *lacking) if one.get("message")]
    return f"{server['kind']} {name}: {said[0] if said else 'starting'}"


def _conditions(one: Object) -> list[Object]:
    return list(one.get("status", {}).get("conditions", ()))
