"""Tasks in containers, each in its role's image: the same argv as a process, a Kubeflow task or a pod.

A container runs as nobody on a read-only root, with no capability and no folder of this machine. It writes to
``/tmp``, which is memory, and to the volume ``qdflash-cache``: the verified copies of inputs, and scratch. What it may
know comes by its environment. It is removed when it has ended; those that a killed engine left are removed by the next
run.
"""

import ipaddress
import os
import socket
import threading
import uuid
from collections.abc import Iterable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import botocore.session
import docker
from docker.errors import APIError, DockerException
from docker.models.containers import Container as DockerContainer
from docker.types import DeviceRequest
from kubernetes.utils import parse_quantity
from requests import RequestException

from components.contract.errors import BUG, TRANSIENT, USER, StageError, UserError, one_line
from components.contract.log import Log
from components.store.backend import Store
from components.store.lease import forget
from components.store.process import start_time
from pipelines import guard, images
from pipelines.cluster import Placement
from pipelines.interpreters import ONLINE, settings
from pipelines.plan import Plan, PlannedTask

VOLUME = "qdflash-cache"
STATE = "/state"
NOBODY = "65532:65532"
RECIPE, WORK, ENGINE = "qdflash.recipe", "qdflash.work", "qdflash.engine"
_GPU = "nvidia.com/gpu"
_PASSED = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "QDFLASH_S3_PATH_STYLE")
_PASSED_ONLINE = ("HF_TOKEN", "HTTPS_PROXY", "NO_PROXY")


class Container:
    """One attempt of a task. Once :meth:`poll` returns a code, the container is gone and its log is whole.

    ``memory_field`` names the recipe's field that its memory comes from.
    """

    def __init__(self, store: Store, log: Path, options: dict[str, Any], memory_field: str) -> None:
        self._store, self._log, self._options, self._memory_field = store, log, options, memory_field
        self._code: int | None = None
        self._ending = False
        self._container: DockerContainer | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        """Return the exit code, 128 + n when signal n ended it, or None while it runs."""
        return self._code

    def terminate(self) -> None:
        """Ask it to end; the Docker engine kills it after a grace period. Returns at once."""
        threading.Thread(target=self._stop, daemon=True).start()

    def wait(self) -> None:
        """Block until it has ended, after :meth:`terminate`."""
        self._thread.join(guard.GRACE_SECONDS + 10)

    def _run(self) -> None:
        code = BUG
        try:
            code = self._attempt(docker.from_env(timeout=images.PATIENCE_SECONDS))
        except APIError as error:  # the engine refused: an image, a limit, a device
            code = self._failed(images.explained(error), USER)
        except (DockerException, RequestException, OSError) as error:
            code = self._failed(f"the Docker engine does not answer any more: {one_line(error)}", TRANSIENT)
        finally:
            self._code = code

    def _attempt(self, client: docker.DockerClient) -> int:
        container = client.containers.create(**self._options)
        try:
            with self._lock:
                if self._ending:
                    return TRANSIENT
                self._container = container
                container.start()
            with self._log.open("ab") as log:
                for chunk in container.logs(stream=True, follow=True):
                    log.write(chunk)
                    log.flush()
            code = int(container.wait(timeout=None)["StatusCode"])
            container.reload()
            if code and container.attrs["State"]["OOMKilled"]:
                limit = f"{self._options['mem_limit'] / 1e9:.3g} GB"
                return self._failed(f"needs more than its {limit} of memory; raise {self._memory_field}", USER)
            return code
        finally:
            with suppress(DockerException, RequestException, StageError):
                _remove(container, self._store)

    def _stop(self) -> None:
        with self._lock:
            self._ending = True
        if self._container is not None:
            with suppress(DockerException, RequestException):
                self._container.stop(timeout=int(guard.GRACE_SECONDS))

    def _failed(self, error: str, code: int) -> int:
        with self._log.open("a") as log:
            Log("docker", log).event("failed", error=error)
        return code


class Containers:
    """Starts the tasks of one plan as containers of the Docker engine that ``DOCKER_HOST`` names."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._client = images.engine()
        self._host = self._client.info()
        self._images: dict[str, str] = {}

    def check(self, tasks: Iterable[PlannedTask]) -> None:
        """Find or fetch the images, and remove what a killed engine left.

        Raises :class:`UserError` for a store that containers cannot reach, a missing image, a limit or a device that
        this engine cannot honour, and a variable that the recipe names and this environment lacks.
        """
        if not self._plan.store.startswith("s3://"):
            raise UserError(
                f"store {self._plan.store}: containers see no folder of this machine; use s3://bucket/prefix"
            )
        for task in tasks:
            self._limits(task)
            self._environment(task)
            if task.role not in self._images:
                self._images[task.role] = images.find(self._client, self._plan.cluster.image(task.role)).id
        for left in self._client.containers.list(all=True, filters={"label": f"{RECIPE}={self._label()}"}):
            host, pid, started = left.labels[ENGINE].split()
            if host == socket.gethostname() and start_time(int(pid)) != started:
                _remove(left, Store(self._plan.store))

    def command(self, task: PlannedTask) -> list[str]:
        """Return what is run."""
        return [self._plan.cluster.image(task.role), "python", *task.argv]

    def start(self, task: PlannedTask, log: Path) -> Container:
        """Start an attempt that appends its output to ``log``."""
        placed = self._plan.cluster.placement(task.name, task.role).memory
        field = f"cluster.tasks.{task.name}.memory" if placed else f"resources.{task.name}.memory_gb"
        return Container(Store(self._plan.store), log, self._options(task), field)

    def _options(self, task: PlannedTask) -> dict[str, Any]:
        """Return what the container is made with, under docker-py's names."""
        engine = f"{socket.gethostname()} {os.getpid()} {start_time(os.getpid())}"
        return {
            "image": self._images[task.role],
            "command": list(task.argv),
            "hostname": f"qdflash-{uuid.uuid4().hex[:12]}",
            "labels": {RECIPE: self._label(), WORK: f"{task.stage}/{task.digest}", ENGINE: engine},
            "environment": self._environment(task),
            "user": NOBODY,
            "read_only": True,
            "tmpfs": {"/tmp": "rw,exec,nosuid,nodev,mode=1777"},  # exec: PyTorch loads the kernels that it compiles
            "volumes": {VOLUME: {"bind": STATE, "mode": "rw"}},
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "network_mode": "host" if _is_loopback(_endpoint()) else "bridge",
            "init": True,
            **self._limits(task),
        }

    def _limits(self, task: PlannedTask) -> dict[str, Any]:
        """Return the limits of the task's placement, else those of its resources.

        A placement is also a request, which has to fit this machine; ``resources`` are a share of it, so all of the
        machine will do.
        """
        placement = self._plan.cluster.placement(task.name, task.role)
        cpus, memory = self._host["NCPU"], self._host["MemTotal"]
        cpu = parse_quantity(placement.cpu) if placement.cpu else min(Decimal(task.cpu), Decimal(cpus))
        limit = int(parse_quantity(placement.memory)) if placement.memory else int(min(task.memory_gb * 1e9, memory))
        where = f"cluster.tasks.{task.name}"
        if cpu > cpus or limit > memory:
            asked, there = f"{cpu} CPUs and {limit / 1e9:.0f} GB", f"{cpus} CPUs and {memory / 1e9:.0f} GB"
            raise UserError(f"{where}: asks for {asked}; this Docker engine has {there}")
        found = {"nano_cpus": int(cpu * 10**9), "mem_limit": limit, "memswap_limit": limit}
        if placement.shm:
            found["shm_size"] = int(parse_quantity(placement.shm))
        return found | self._devices(where, placement)

    def _devices(self, where: str, placement: Placement) -> dict[str, Any]:
        if not placement.gpus:
            return {}
        if placement.gpu_resource not in (None, _GPU):
            raise UserError(f"{where}.gpu_resource: {placement.gpu_resource}; a Docker engine gives {_GPU} alone")
        if "nvidia" not in self._host["Runtimes"]:
            raise UserError(f"{where}: asks for a GPU; this Docker engine has no NVIDIA runtime (see nvidia-ctk)")
        return {"device_requests": [DeviceRequest(count=placement.gpus, capabilities=[["gpu"]])]}

    def _environment(self, task: PlannedTask) -> dict[str, str]:
        """Return the whole environment but what the image sets: the store, hubs, and what the recipe names."""
        names = {*_PASSED, *(_PASSED_ONLINE if task.stage in ONLINE else ())}
        found = {name: os.environ[name] for name in names if os.environ.get(name)} | _credentials()
        placement = self._plan.cluster.placement(task.name, task.role)
        for kind, given in (("secrets", placement.secrets), ("config_maps", placement.config_maps)):
            for variable in (one for keys in (given or {}).values() for one in keys.values()):
                if variable not in found and not os.environ.get(variable):
                    raise UserError(f"{variable}: not set, and {task.name} gets it by cluster.…{kind}; export it")
                found.setdefault(variable, os.environ.get(variable, ""))
        return {**found, "QDFLASH_HOME": STATE, **settings(task.stage, task.cpu)}

    def _label(self) -> str:
        return f"{self._plan.store} {self._plan.recipe}"


def _remove(container: DockerContainer, store: Store) -> None:
    """Remove a container, and the lease that it can no longer give back when it was killed."""
    container.remove(force=True)
    forget(store, f"_work/{container.labels[WORK]}/_lease.json", container.attrs["Config"]["Hostname"])


def _credentials() -> dict[str, str]:
    """Return the store's keys from wherever this machine has them; a container cannot read ``~/.aws``."""
    found = botocore.session.Session().get_credentials()
    if found is None:
        return {}
    key = found.get_frozen_credentials()
    named = {
        "AWS_ACCESS_KEY_ID": key.access_key,
        "AWS_SECRET_ACCESS_KEY": key.secret_key,
        "AWS_SESSION_TOKEN": key.token,
    }
    return {name: value for name, value in named.items() if value}


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def _is_loopback(url: str) -> bool:
    """Say whether an address means this machine: a container reaches it on the machine's own network alone."""
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
