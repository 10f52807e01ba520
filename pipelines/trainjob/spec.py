"""A task of a plan as a pod: its own command, or for training on several nodes the launcher of its TrainJob."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipelines.cluster import Placement, processes
from pipelines.plan import Plan, PlannedTask

RUNTIME = "qdflash-train"
"""The TrainingRuntime of manifests/base/training-runtime.yaml, whose one container is called ``node``."""
ACCOUNT, STAGE_ACCOUNT = "qdflash-launcher", "qdflash-stage"
"""Accounts of manifests/base: what starts TrainJobs, and what runs stages. KFP has one for a whole run."""
NODE = "node"
EXIT_CODES = "/dev/termination-log"
"""Where a node's processes leave their exit codes: torchrun ends with 1 whatever they end with."""
HOME = "/tmp/qdflash"
"""QDFLASH_HOME of the images."""
NOBODY = 65532
"""The group of the images' user."""
POD, NAMESPACE = "QDFLASH_POD", "QDFLASH_NAMESPACE"
FIELDS = {POD: "metadata.name", NAMESPACE: "metadata.namespace"}
"""What a launcher's environment takes from its own pod."""

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """What runs a task: ``argv`` follows the interpreter of ``image``; ``launches`` says that it starts a TrainJob."""

    image: str
    argv: tuple[str, ...]
    placement: Placement
    launches: bool = False


def pod_of(plan: Plan, task: PlannedTask) -> Pod:
    """Return the pod of a task. A launcher runs in core's image with core's placement."""
    cluster, placement = plan.cluster, plan.cluster.placement(task.name, task.role)
    image = cluster.image(task.role)
    if (placement.nodes or 1) == 1:
        return Pod(image, task.argv, placement)
    spec = json.dumps(job_spec(task.argv, image, placement), separators=(",", ":"))
    launcher = ("-m", "pipelines.trainjob", "--spec", spec, "--", *task.argv)
    return Pod(cluster.image("core"), launcher, cluster.placement("", "core"), launches=True)


def launches(plan: Plan) -> bool:
    """Say whether a task of the plan that will run trains on several nodes."""
    running = (task for task in plan.tasks if task.state == "run")
    return any((plan.cluster.placement(task.name, task.role).nodes or 1) > 1 for task in running)


def job_spec(argv: tuple[str, ...], image: str, placement: Placement) -> Object:
    """Return the spec of a TrainJob that runs ``argv`` under torchrun on every node."""
    config = json.loads(argv[argv.index("--config") + 1])
    trainer: Object = {
        "image": image,
        "command": ["torchrun"],
        "args": list(argv),
        "numNodes": placement.nodes,
        "numProcPerNode": processes(placement, config["processes"]),
        "env": [{"name": "QDFLASH_EXIT_CODES", "value": EXIT_CODES}, *environment(placement)],
    }
    if share := resources(placement):
        trainer["resourcesPerNode"] = {"requests": share, "limits": share}
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": RUNTIME}
    spec: Object = {"runtimeRef": runtime, "trainer": trainer}
    if pod := _pod_patch(placement):
        job = {"name": NODE, "template": {"spec": {"template": {"spec": pod}}}}
        patch = {"template": {"spec": {"replicatedJobs": [job]}}}
        spec["runtimePatches"] = [{"manager": "qdflash.io/launcher", "trainingRuntimeSpec": patch}]
    return spec


def environment(placement: Placement) -> Iterator[Object]:
    """Yield the variables that come from secrets and config maps, as a container's ``env`` has them."""
    for source, given in (("secretKeyRef", placement.secrets), ("configMapKeyRef", placement.config_maps)):
        for name, keys in (given or {}).items():
            for key, variable in keys.items():
                yield {"name": variable, "valueFrom": {source: {"name": name, "key": key}}}


def resources(placement: Placement) -> dict[str, str]:
    """Return what a pod asks for and is limited to, which is the same; a GPU can only be limited."""
    shares = {"cpu": placement.cpu, "memory": placement.memory}
    if placement.gpus:
        shares[placement.gpu_resource or "nvidia.com/gpu"] = str(placement.gpus)
    return {name: share for name, share in shares.items() if share}


def volumes(placement: Placement) -> Iterator[tuple[Object, str]]:
    """Yield the volumes that a placement asks for, each with the folder it is mounted on."""
    if placement.shm:
        yield {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": placement.shm}}, "/dev/shm"
    if placement.scratch:
        claim: Object = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": placement.scratch}}}
        if placement.storage_class:
            claim["storageClassName"] = placement.storage_class
        yield {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}, HOME


def _pod_patch(placement: Placement) -> Object:
    """Return what of the runtime's pod a placement changes."""
    pod: Object = {}
    if placement.node_selector:
        pod["nodeSelector"] = placement.node_selector
    if placement.tolerations:
        pod["tolerations"] = [one.model_dump(exclude_none=True) for one in placement.tolerations]
    if found := list(volumes(placement)):
        pod["volumes"] = [volume for volume, _ in found]
        mounts = [{"name": volume["name"], "mountPath": path} for volume, path in found]
        pod["containers"] = [{"name": NODE, "volumeMounts": mounts}]
    return pod
