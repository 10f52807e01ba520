"""How an InferenceService or a Deployment goes, for ``controllers.playing``: its pods, and what becomes of them."""

from collections.abc import Iterator

from tests.kubernetes_api.controllers import Object, Script, World

STEP = 0.05
SCHEDULED = {"type": "PodScheduled", "status": "True"}


def serves(address: tuple[str, int], steps: int = 1, flaps: int = 0) -> Script:
    """Return a script whose pods become ready after ``steps``; ``address`` answers for their port.

    ``flaps`` times the server's condition goes to False and back before, as KServe's does while a start is slow.
    """

    def script(world: World, one: Object) -> Iterator[float]:
        _replace(world, one)
        for _ in range(steps):
            _pod(world, one, {"phase": "Pending", "conditions": [SCHEDULED]})
            yield STEP
        for _ in range(flaps):
            _conditions(world, one, False, "ProgressDeadlineExceeded")
            yield STEP
            _conditions(world, one, None, "")
            yield STEP
        pod = _pod(world, one, {"phase": "Running", "conditions": [SCHEDULED, {"type": "Ready", "status": "True"}]})
        world.state.forwards[pod["metadata"]["name"]] = address
        _conditions(world, one, True, "")

    return script


def unready(status: Object, logs: dict[str, str] | None = None, previous: bool = True) -> Script:
    """Return a script whose pod stays at ``status``; ``logs`` are its containers', before their restart."""

    def script(world: World, one: Object) -> Iterator[float]:
        _replace(world, one)
        pod = _pod(world, one, {"phase": "Pending", **status})
        for container, text in (logs or {}).items():
            world.log(pod, text, container, previous=previous)
        _conditions(world, one, False, "MinimumReplicasUnavailable")
        yield STEP

    return script


def waiting(container: str, reason: str, message: str = "", restarts: int = 0, last: Object | None = None) -> Object:
    """Return a container's status that waits for ``reason``; ``last`` is how its last run terminated."""
    found = {"name": container, "image": "i", "imageID": "", "ready": False, "restartCount": restarts}
    state = {"state": {"waiting": {"reason": reason, "message": message}}}
    return found | state | ({"lastState": {"terminated": last}} if last else {})


def _replace(world: World, one: Object) -> None:
    """Stop the pods of the generation before, as a rollout without surge does."""
    _conditions(world, one, False, "rolling out")
    world.remove(one)


def _conditions(world: World, one: Object, state: bool | None, message: str) -> None:
    kind = {"Available": state} if one["kind"] == "Deployment" else {"Ready": state}
    world.conditions(one, "Scripted", message, **kind)


def _pod(world: World, one: Object, status: Object) -> Object:
    spec, name = one["spec"], one["metadata"]["name"]
    labels = spec["template"]["metadata"]["labels"] if one["kind"] == "Deployment" else spec["predictor"]["labels"]
    containers = [{"name": "kserve-container", "image": "i"}]
    pod = {"initContainers": [{"name": "storage-initializer", "image": "i"}], "containers": containers}
    return world.pod(one, f"{name}-predictor-{one['metadata']['generation']}-abcde", labels, pod, status)
