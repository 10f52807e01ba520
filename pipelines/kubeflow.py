"""A plan as a Kubeflow pipeline: KFP IR YAML with the plan's own argv in every task."""

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

from kfp import dsl, kubernetes
from kfp.compiler import Compiler, KubernetesManifestOptions

from components.contract.container import artifact_inputs
from components.contract.errors import UserError
from components.store.artifact import MANIFEST
from pipelines.cluster import Placement
from pipelines.plan import Plan, PlannedTask, demand_pods
from pipelines.trainjob.spec import FIELDS, HOME, pod_of


def compile_plan(plan: Plan, path: Path, objects: bool = False) -> None:
    """Write the IR YAML of ``plan`` to ``path`` (``*.yaml``); the same plan gives the same bytes.

    Cached tasks become importers of their manifests, skipped ones are left out. KFP's own cache is off: the plan has
    decided already. With ``objects`` the IR is wrapped in the Pipeline and PipelineVersion that ``kubectl apply``
    takes where KFP keeps pipelines in the Kubernetes API; the version is named by what it runs. Raises
    :class:`UserError` for a blocked task, a missing image, or a store that pods cannot reach.
    """
    demand_pods(plan)
    if path.suffix != ".yaml":
        raise UserError(f"{path}: KFP wants a name that ends in .yaml")

    settings = dsl.PipelineConfig(ttl_seconds_after_finished=plan.cluster.ttl_seconds)

    @dsl.pipeline(
        name=plan.recipe, description=f"qdflash recipe {plan.recipe} on {plan.store}", pipeline_config=settings
    )
    def pipeline() -> None:
        made: dict[str, Any] = {}
        for task in plan.tasks:
            if task.state == "cached":
                made[task.name] = _importer(task)
            elif task.state == "run":
                made[task.name] = _pod(plan, task, made)

    content = hashlib.sha256(json.dumps(plan.to_json(), sort_keys=True).encode()).hexdigest()
    named = KubernetesManifestOptions(
        pipeline_name=plan.recipe,
        pipeline_version_name=f"{plan.recipe}-{content[:10]}",
        include_pipeline_manifest=True,
    )
    Compiler().compile(
        pipeline, str(path), kubernetes_manifest_format=objects, kubernetes_manifest_options=named if objects else None
    )


def _importer(task: PlannedTask) -> Any:
    """Import a committed task's manifest in its place: no pod starts to find nothing to do."""
    metadata = {"digest": task.digest, "uri": task.uri, "stage": task.stage}
    imported = dsl.importer(
        artifact_uri=f"{task.uri}/{MANIFEST}", artifact_class=dsl.Artifact, reimport=False, metadata=metadata
    )
    return imported.set_display_name(task.name)


def _pod(plan: Plan, task: PlannedTask, made: dict[str, Any]) -> Any:
    """Add the task as a pod that reads the manifests of the tasks it needs."""
    if any("{{$" in word for word in task.argv):
        raise UserError(f"{task.name}: its config holds {{{{$, which KFP takes for a placeholder; word it otherwise")
    module = importlib.import_module(f"components.{task.stage}.component")
    runs = pod_of(plan, task)
    makers = {one.uri: made[one.name] for one in plan.tasks if one.name in made}
    if task.soft_needs:
        # KFP refuses inputs from tasks that may fail: this pod is ordered after all it reads, and runs regardless.
        component = module.component(runs.image, runs.argv, name=task.name, edges=False)
        pod = component().after(*(made[name] for name in (*task.needs, *task.soft_needs))).ignore_upstream_failure()
    else:
        component = module.component(runs.image, runs.argv, name=task.name)
        pod = component(**{port: makers[uri].output for port, uri in artifact_inputs(task.argv).items()})
    pod.set_display_name(task.name).set_caching_options(False)
    if plan.cluster.retries:
        pod.set_retry(plan.cluster.retries, backoff_duration="60s", backoff_factor=2.0, backoff_max_duration="600s")
    # What manifests/ selects pods by: which of them may reach outside.
    kubernetes.add_pod_label(pod, "app.kubernetes.io/part-of", "qdflash")
    kubernetes.add_pod_label(pod, "app.kubernetes.io/component", task.stage)
    if runs.launches:
        for variable, path in FIELDS.items():
            kubernetes.use_field_path_as_env(pod, variable, path)
    _place(pod, task.name, runs.placement)
    return pod


def _place(pod: Any, name: str, placement: Placement) -> None:
    """Give the pod its resources, node, volumes, secrets and settings."""
    if placement.priority:
        raise UserError(f"{name}: cluster priority {placement.priority}: KFP sets none; compile for argo, or leave it")
    if placement.cpu:
        pod.set_cpu_request(placement.cpu).set_cpu_limit(placement.cpu)
    if placement.memory:
        pod.set_memory_request(placement.memory).set_memory_limit(placement.memory)
    if placement.gpus:
        pod.set_accelerator_type(placement.gpu_resource or "nvidia.com/gpu").set_accelerator_limit(placement.gpus)
    if placement.shm:
        kubernetes.empty_dir_mount(
            pod, volume_name="shm", mount_path="/dev/shm", medium="Memory", size_limit=placement.shm
        )
    if placement.scratch:
        kubernetes.add_ephemeral_volume(
            pod, "scratch", HOME, ["ReadWriteOnce"], placement.scratch, storage_class_name=placement.storage_class
        )
    for key, value in (placement.node_selector or {}).items():
        kubernetes.add_node_selector(pod, key, value)
    for toleration in placement.tolerations or []:
        kubernetes.add_toleration(pod, **toleration.model_dump(exclude_none=True))
    for secret, keys in (placement.secrets or {}).items():
        kubernetes.use_secret_as_env(pod, secret_name=secret, secret_key_to_env=keys)
    for config_map, keys in (placement.config_maps or {}).items():
        kubernetes.use_config_map_as_env(pod, config_map_name=config_map, config_map_key_to_env=keys)
