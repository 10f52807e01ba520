"""How a TrainJob goes, for ``controllers.playing``; pods are named and labelled as Trainer's JobSets do it."""

from collections.abc import Iterator

from tests.kubernetes_api.controllers import Object, Script, World

STEP = 0.05
NODE = "node"


def job(
    lines: list[str],
    end: str = "Complete",
    exit_code: int = 0,
    step: float = STEP,
    nodes: int | None = None,
    words: dict[int, str] | None = None,
) -> Script:
    """Return a script that starts the nodes, logs ``lines`` on each, then ends as ``Complete`` or ``Failed``.

    ``words`` are the termination messages of nodes.
    """

    def script(world: World, one: Object) -> Iterator[float]:
        world.conditions(one, "Created", Suspended=False)
        yield step
        count = nodes or one["spec"].get("trainer", {}).get("numNodes", 2)
        pods = [_node(world, one, index, {"phase": "Pending"}) for index in range(count)]
        yield step
        for index, pod in enumerate(pods):
            _node(world, one, index, {"phase": "Running", "containerStatuses": [_container({"running": {}})]})
            world.log(pod, "")
        for line in lines:
            for index, pod in enumerate(pods):
                world.log(pod, f"{line} ({index})\n")
            yield step
        phase = "Failed" if exit_code else "Succeeded"
        for index in range(count):
            terminated = {"terminated": {"exitCode": exit_code, "message": (words or {}).get(index, "")}}
            _node(world, one, index, {"phase": phase, "containerStatuses": [_container(terminated)]})
        yield step
        world.conditions(one, "JobsFinished", f"{NODE}: exit code {exit_code}", **{end: True})

    return script


def flapping(lines: list[str], times: int = 3) -> Script:
    """Return a script whose condition goes to and fro, and whose pods are lost, before it completes."""

    def script(world: World, one: Object) -> Iterator[float]:
        for _ in range(times):
            world.conditions(one, "Suspended", "waiting for quota", Suspended=True)
            yield STEP
            world.conditions(one, "Resumed", Suspended=False)
            _node(world, one, 0, {"phase": "Running", "containerStatuses": [_container({"running": {}})]})
            yield STEP
            world.remove(one)
        yield from job(lines)(world, one)

    return script


def _node(world: World, one: Object, index: int, status: Object) -> Object:
    name = one["metadata"]["name"]
    labels = {
        "jobset.sigs.k8s.io/jobset-name": name,
        "jobset.sigs.k8s.io/replicatedjob-name": NODE,
        "jobset.sigs.k8s.io/job-index": "0",
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    image = one["spec"].get("trainer", {}).get("image", "scripted")
    spec = {"containers": [{"name": NODE, "image": image}]}
    return world.pod(one, f"{name}-{NODE}-0-{index}-abcde", labels, spec, status)


def _container(state: Object) -> Object:
    return {"name": NODE, "image": "scripted", "imageID": "", "ready": False, "restartCount": 0, "state": state}
