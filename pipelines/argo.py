"""A plan as an Argo Workflow: the plan's own argv in every pod, for clusters without Kubeflow Pipelines.

Nothing passes through Argo: stages read and write the store, so no artifact repository is needed, and what is
committed is left out, which is all the memoisation there is.
"""

from pathlib import Path

import yaml
from hera.workflows import models

from components.contract.errors import TRANSIENT, UserError
from pipelines.cluster import Placement
from pipelines.plan import Plan, PlannedTask, demand_pods

ACCOUNT = "qdflash-stage"
_ENDED = ("Succeeded", "Failed", "Errored", "Skipped", "Omitted")
# Exit 75 asks for another attempt; above 128 a signal ended the process; an Error is a pod that was lost.
_AGAIN = f'lastRetry.status == "Error" || asInt(lastRetry.exitCode) == {TRANSIENT} || asInt(lastRetry.exitCode) > 128'


def compile_plan(plan: Plan, path: Path) -> None:
    """Write the Workflow of ``plan`` to ``path``, for ``argo submit`` or ``kubectl create``.

    Raises :class:`UserError` for a blocked task, a missing image, a store that pods cannot reach, or nothing to run.
    """
    demand_pods(plan)
    tasks = [task for task in plan.tasks if task.state == "run"]
    if not tasks:
        raise UserError(f"{plan.recipe}: everything is committed; there is nothing to run")
    workflow = models.Workflow(
        api_version="argoproj.io/v1alpha1",
        kind="Workflow",
        metadata=models.ObjectMeta(generate_name=f"{plan.recipe}-", labels={"app.kubernetes.io/part-of": "qdflash"}),
        spec=models.WorkflowSpec(
            entrypoint="pipeline",
            service_account_name=ACCOUNT,
            automount_service_account_token=True,  # Argo's executor reports how a pod ended
            security_context=models.PodSecurityContext(
                run_as_non_root=True, seccomp_profile=models.SeccompProfile(type="RuntimeDefault")
            ),
            templates=[_dag(tasks), *(_pod(plan, task) for task in tasks)],
        ),
    )
    document = workflow.model_dump(mode="json", by_alias=True, exclude_none=True)
    path.write_text(yaml.safe_dump(document, sort_keys=False, width=119))


def _dag(tasks: list[PlannedTask]) -> models.Template:
    """Return the DAG; a branch that fails keeps no other from running."""
    running = {task.name for task in tasks}
    nodes = [
        models.DAGTask(name=_name(task.name), template=_name(task.name), depends=_depends(task, running) or None)
        for task in tasks
    ]
    return models.Template(name="pipeline", dag=models.DAGTemplate(tasks=nodes, fail_fast=False))


def _depends(task: PlannedTask, running: set[str]) -> str:
    """Return Argo's expression for what a task waits for; what is committed already is not waited for."""
    needs = [f"{_name(name)}.Succeeded" for name in task.needs if name in running]
    ended = [
        f"({' || '.join(f'{_name(name)}.{state}' for state in _ENDED)})" for name in task.soft_needs if name in running
    ]
    return " && ".join(needs + ended)


def _pod(plan: Plan, task: PlannedTask) -> models.Template:
    if any("{{" in word for word in task.argv):
        raise UserError(f"{task.name}: its config holds {{{{, which Argo takes for a parameter; compile for kfp")
    placement = plan.cluster.placement(task.name, task.role)
    mounts = [models.VolumeMount(name="tmp", mount_path="/tmp")]
    volumes = [models.Volume(name="tmp", empty_dir=models.EmptyDirVolumeSource())]
    if placement.shm:
        mounts.append(models.VolumeMount(name="shm", mount_path="/dev/shm"))
        memory = models.EmptyDirVolumeSource(medium="Memory", size_limit=placement.shm)
        volumes.append(models.Volume(name="shm", empty_dir=memory))
    retries = models.RetryStrategy(
        limit=str(plan.cluster.retries),
        retry_policy="Always",
        expression=_AGAIN,
        backoff=models.Backoff(duration="60s", factor="2"),  # a max_duration would end retries, not pauses
    )
    return models.Template(
        name=_name(task.name),
        metadata=models.Metadata(
            labels={"app.kubernetes.io/part-of": "qdflash", "app.kubernetes.io/component": task.stage}
        ),
        container=models.Container(
            image=plan.cluster.image(task.role),
            command=["python"],
            args=list(task.argv),
            env=_environment(placement) or None,
            resources=_resources(placement),
            security_context=models.SecurityContext(
                run_as_non_root=True,
                allow_privilege_escalation=False,
                read_only_root_filesystem=True,
                capabilities=models.Capabilities(drop=["ALL"]),
            ),
            volume_mounts=mounts,
        ),
        volumes=volumes,
        node_selector=placement.node_selector,
        tolerations=[models.Toleration(**one.model_dump(exclude_none=True)) for one in placement.tolerations or ()]
        or None,
        retry_strategy=retries if plan.cluster.retries else None,
    )


def _environment(placement: Placement) -> list[models.EnvVar]:
    found = []
    for name, keys in (placement.secrets or {}).items():
        for key, variable in keys.items():
            source = models.EnvVarSource(secret_key_ref=models.SecretKeySelector(name=name, key=key))
            found.append(models.EnvVar(name=variable, value_from=source))
    for name, keys in (placement.config_maps or {}).items():
        for key, variable in keys.items():
            chosen = models.ConfigMapKeySelector(name=name, key=key)
            found.append(models.EnvVar(name=variable, value_from=models.EnvVarSource(config_map_key_ref=chosen)))
    return found


def _resources(placement: Placement) -> models.ResourceRequirements | None:
    """Return requests and limits, which are the same; a GPU can only be limited."""
    shares = {"cpu": placement.cpu, "memory": placement.memory}
    if placement.gpus:
        shares[placement.gpu_resource or "nvidia.com/gpu"] = str(placement.gpus)
    shares = {name: share for name, share in shares.items() if share}
    return models.ResourceRequirements(requests=shares, limits=shares) if shares else None


def _name(task: str) -> str:
    return task.replace("_", "-")
