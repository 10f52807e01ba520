"""The ``cluster:`` part of a recipe: images, placement and secrets, by role and by task."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from components.contract.errors import UserError

LOCK = Path(__file__).resolve().parents[1] / "images" / "lock.yaml"


def _by_digest(image: str) -> str:
    if not re.fullmatch(r"[^@\s]+@sha256:[0-9a-f]{64}", image):
        raise PydanticCustomError("image", "an image goes by its digest: registry/name@sha256: and 64 hex digits")
    return image


Image = Annotated[str, AfterValidator(_by_digest)]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|[KMGT]i?)?$")]
Cpu = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?m?$", coerce_numbers_to_str=True)]
_DOMAIN = r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?"
_LABEL = r"[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?"
Name = Annotated[str, Field(pattern=f"^{_DOMAIN}$", max_length=253)]
Qualified = Annotated[str, Field(pattern=f"^({_DOMAIN}/)?{_LABEL}$")]
LabelValue = Annotated[str, Field(pattern=f"^({_LABEL})?$", coerce_numbers_to_str=True)]
DataKey = Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Images(_Strict):
    """One image per role, by digest."""

    core: Image | None = Field(None, description="Image of the core role, registry/name@sha256:…")
    train: Image | None = Field(None, description="Image of the train role, registry/name@sha256:…")
    vllm: Image | None = Field(None, description="Image of the vllm role, registry/name@sha256:…")


class Toleration(_Strict):
    """A taint that pods of these tasks tolerate (Kubernetes Toleration)."""

    key: Qualified | None = Field(None, description="Taint key; none tolerates every taint")
    operator: Literal["Equal", "Exists"] = Field("Equal", description="How value is compared")
    value: LabelValue | None = Field(None, description="Taint value")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(None, description="Taint effect")


class Placement(_Strict):
    """What a pod asks for and where it may run. Fields left out are inherited: task from role."""

    cpu: Cpu | None = Field(None, description="CPU request and limit, e.g. 8")
    memory: Quantity | None = Field(None, description="Memory request and limit, e.g. 64Gi")
    gpus: int | None = Field(None, description="GPUs", ge=0)
    gpu_resource: Qualified | None = Field(None, description="Resource name of a GPU; nvidia.com/gpu when not set")
    shm: Quantity | None = Field(None, description="Size of a memory-backed /dev/shm, e.g. 16Gi")
    scratch: Quantity | None = Field(
        None, description="Size of a volume for fetched inputs and scratch that lives as long as the pod, e.g. 500Gi"
    )
    storage_class: Name | None = Field(
        None, description="StorageClass of that volume; the cluster's default when not set"
    )
    priority: Name | None = Field(None, description="PriorityClass of the pod; Argo only, KFP cannot set it")
    nodes: int | None = Field(
        None, description="qad and drafter: machines that train together, as a Kubeflow TrainJob; 1 when not set", ge=1
    )
    node_selector: dict[Qualified, LabelValue] | None = Field(None, description="Node labels that must match")
    tolerations: list[Toleration] | None = Field(None, description="Taints to tolerate")
    secrets: dict[Name, dict[DataKey, Variable]] | None = Field(
        None, description="Secret name to {its key: environment variable}"
    )
    config_maps: dict[Name, dict[DataKey, Variable]] | None = Field(
        None, description="ConfigMap name to {its key: environment variable}, e.g. the store's endpoint"
    )


def locked_images() -> dict[str, str]:
    """Return the images that ``images/lock.yaml`` names, by role: what a recipe's ``cluster.images`` default to."""
    if not LOCK.is_file():
        return {}
    try:
        return Images.model_validate(yaml.safe_load(LOCK.read_text())).model_dump(exclude_none=True)
    except (yaml.YAMLError, ValidationError) as error:
        raise UserError(f"{LOCK}: not as qdflash images lock writes it; run that again") from error


class Cluster(_Strict):
    """How the tasks become pods."""

    images: Images = Field(Images(), description="Images by role; those of images/lock.yaml where it names them")
    roles: dict[Literal["core", "train", "vllm"], Placement] = Field({}, description="Placement by role")
    tasks: dict[str, Placement] = Field({}, description="Placement by task, over that of its role")
    retries: int = Field(2, description="Times a failed pod is started again after a minute or more; it resumes", ge=0)
    ttl_seconds: int | None = Field(
        None, description="Seconds after its end that a run and its pods are kept; for ever when not set", ge=1
    )

    def image(self, role: str) -> str:
        """Return the role's image; raises :class:`UserError` when there is none."""
        image: str | None = getattr(self.images, role)
        if image is None:
            example = f"registry.example/qdflash-{role}@sha256:…"
            raise UserError(
                f"cluster.images.{role}: not given; name the image by digest, such as {example}, or see qdflash images"
            )
        return image

    def placement(self, task: str, role: str) -> Placement:
        """Return the task's placement: its own fields over its role's."""
        below = self.roles.get(role, Placement())  # type: ignore[call-overload]
        above = self.tasks.get(task, Placement())
        given = {name: value for name, value in above if value is not None}
        return below.model_copy(update=given)

    def faults(self, stages: dict[str, str], configs: dict[str, Any]) -> list[str]:
        """Return what is wrong with the placements of a recipe's tasks, given each task's stage and config."""
        found = [f"cluster.roles.{role}.nodes: give it to a task" for role, one in self.roles.items() if one.nodes]
        for name, placement in self.tasks.items():
            config, nodes = configs.get(name), placement.nodes or 1
            if nodes > 1 and stages.get(name) not in SPREAD:
                found.append(f"cluster.tasks.{name}.nodes: only {' and '.join(SPREAD)} train on several machines")
            elif nodes > 1 and config:
                placement = self.placement(name, "train")
                world = nodes * processes(placement, config.processes)
                if config.batch % (config.micro_batch * world):
                    parts = f"micro-batches of {config.micro_batch} on {world} processes of {nodes} nodes"
                    found.append(f"{name}.batch: {config.batch} does not split into {parts}")
                if placement.priority:
                    found.append(
                        f"cluster.tasks.{name}.priority: a TrainJob's is in its TrainingRuntime's pod template"
                    )
        return found


SPREAD = ("qad", "drafter")
"""The stages that train on several nodes."""


def processes(placement: Placement, given: int) -> int:
    """Return the processes of one node: as many as the config gives, else one per GPU, else one."""
    return given or placement.gpus or 1
