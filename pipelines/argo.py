"""A plan as an Argo Workflow: the plan's own argv in every pod, for clusters without Kubeflow Pipelines.

Nothing passes through Argo: stages read and write the store, so no artifact repository is needed, and what is
committed is left out, which is all the memoisation there is.
"""

from pathlib import Path

import yaml
from hera.workflows import models

from components.contract.errors import TRANSIENT, UserError
from pipelines.plan import Plan, PlannedTask, demand_pods
from pipelines.trainjob.spec import (
    ACCOUNT,
    FIELDS,
    NOBODY,
    STAGE_ACCOUNT,
    environment,
    pod_of,
    resources,
    volumes,
)

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
    ttl = plan.cluster.ttl_seconds
    workflow = models.Workflow(
        api_version="argoproj.io/v1alpha1",
        kind="Workflow",
        metadata=models.ObjectMeta(generate_name=f"{plan.recipe}-", labels={"app.kubernetes.io/part-of": "qdflash"}),
        spec=models.WorkflowSpec(
            entrypoint="pipeline",
            service_account_name=STAGE_ACCOUNT,
            automount_service_account_token=True,  # Argo's executor reports how a pod ended
            security_context=_security(),
            ttl_strategy=models.TTLStrategy(seconds_after_completion=ttl) if ttl is not None else None,
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
    pod = pod_of(plan, task)
    placement, share = pod.placement, resources(pod.placement)
    mounted = [({"name": "tmp", "emptyDir": {}}, "/tmp"), *volumes(placement)]
    fields = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in FIELDS.items()]
    variables = [*(fields if pod.launches else ()), *environment(placement)]
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
            image=pod.image,
            command=["python"],
            args=list(pod.argv),
            env=[models.EnvVar.model_validate(one) for one in variables] or None,
            resources=models.ResourceRequirements(requests=share, limits=share) if share else None,
            security_context=models.SecurityContext(
                run_as_non_root=True,
                allow_privilege_escalation=False,
                read_only_root_filesystem=True,
                capabilities=models.Capabilities(drop=["ALL"]),
            ),
            volume_mounts=[models.VolumeMount(name=one["name"], mount_path=path) for one, path in mounted],
        ),
        volumes=[models.Volume.model_validate(one) for one, _ in mounted],
        service_account_name=ACCOUNT if pod.launches else None,
        security_context=_security(fs_group=NOBODY) if placement.scratch else None,
        priority_class_name=placement.priority,
        node_selector=placement.node_selector,
        tolerations=[models.Toleration(**one.model_dump(exclude_none=True)) for one in placement.tolerations or ()]
        or None,
        retry_strategy=retries if plan.cluster.retries else None,
    )


def _security(fs_group: int | None = None) -> models.PodSecurityContext:
    """Return the pod's security context; a volume of its own is writable by the image's user through a group."""
    profile = models.SeccompProfile(type="RuntimeDefault")
    return models.PodSecurityContext(run_as_non_root=True, seccomp_profile=profile, fs_group=fs_group)


def _name(task: str) -> str:
    return task.replace("_", "-")
