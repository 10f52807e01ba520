"""The roles' images: built from ``images/Dockerfile`` by a Docker engine, pushed, and named in ``images/lock.yaml``.

An image carries the hash of the files that it was made from (label ``qdflash.sources``), so that ``verify`` can say
whether an image is of this checkout.
"""

import contextlib
import hashlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import yaml
from docker.errors import APIError, DockerException, ImageNotFound
from docker.models.images import Image
from docker.utils.build import exclude_paths
from requests import RequestException

from components.contract.errors import UserError, one_line
from pipelines.cluster import LOCK, locked_images
from pipelines.interpreters import ROLES

ROOT = LOCK.parents[1]
DOCKERFILE = "images/Dockerfile"
SOURCES = "qdflash.sources"
PATIENCE_SECONDS = 600
"""How long an engine may take to answer: one that removes or commits gigabytes answers nobody meanwhile."""
_PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX")
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_HEAD = """\
# Written by `qdflash images lock`. What a recipe's cluster.images are unless it names others.
"""

Say = Callable[[str], None]


def engine() -> docker.DockerClient:
    """Return a client of the Docker engine that ``DOCKER_HOST`` or the usual socket names."""
    with _refusals("no Docker engine answers; start one, or name its socket with DOCKER_HOST"):
        client = docker.from_env(timeout=PATIENCE_SECONDS)
        client.ping()
        return client


def find(client: docker.DockerClient, name: str, say: Say = print) -> Image:
    """Return the image ``NAME@sha256:…``: by its digest, by its ID where it was made on this engine, or pulled."""
    for known in (name, name.partition("@")[2]):
        if known:
            with contextlib.suppress(ImageNotFound):
                return client.images.get(known)
    if "@" not in name:
        raise UserError(f"image {name}: not on this Docker engine; pull it, or name it by digest (NAME@sha256:…)")
    say(f"pulling {name}")
    with _refusals(f"image {name}"):
        return client.images.pull(name)


def build(client: docker.DockerClient, role: str, accelerator: str, base: str, builder: str | None, say: Say) -> Image:
    """Build the image of ``role`` and tag it ``qdflash-<role>``; the base is pinned by what the engine has under it.

    Raises :class:`UserError` with the engine's last words when a step fails.
    """
    lock = role if role == "core" else f"{role}-{accelerator}"
    sources = _sources(lock)
    below = find(client, base, say)
    arguments = {
        "LOCK": lock,
        "BASE": below.id,
        "BUILDER": find(client, builder, say).id if builder else below.id,
        "REVISION": _revision(),
        **{name: os.environ[name] for name in _PIP if name in os.environ},
    }
    labels = {SOURCES: sources, "org.opencontainers.image.base.digest": below.id}
    said: list[str] = []
    with _refusals(f"image of {role}"):
        stream = client.api.build(
            path=str(ROOT),
            dockerfile=DOCKERFILE,
            tag=f"qdflash-{role}",
            buildargs=arguments,
            labels=labels,
            network_mode="host",
            rm=True,
            forcerm=True,
            decode=True,
        )
        for event in stream:
            for line in _COLOUR.sub("", str(event.get("stream", ""))).splitlines():
                if line.strip():
                    if not line.startswith(("Step ", " ---> ", "Removing ")):
                        said = [*said[-9:], line.strip()]
                    say(f"{role}: {line.rstrip()}")
            if "error" in event:
                raise UserError(f"image of {role}: {event['error']}; the step's last words: {' | '.join(said)}")
    return client.images.get(f"qdflash-{role}")


def lock(client: docker.DockerClient, registry: str, say: Say) -> dict[str, str]:
    """Push the roles' images to ``registry`` and record their digests; roles that were not built keep theirs.

    The tag is the hash of the sources, so that no push takes another image's last name from it.
    """
    images = locked_images()
    for role in ROLES:
        try:
            image = client.images.get(f"qdflash-{role}")
        except ImageNotFound:
            continue
        repository, tag = f"{registry.rstrip('/')}/qdflash-{role}", image.labels.get(SOURCES, "")[:12]
        if not tag:
            raise UserError(f"image qdflash-{role}: not made by qdflash images build; build it anew")
        with _refusals(f"image {repository}"):
            image.tag(repository, tag)
            images[role] = f"{repository}@{_push(client, repository, tag, say)}"
    if not images:
        raise UserError("no image to push: run qdflash images build first")
    LOCK.write_text(_HEAD + yaml.safe_dump(images))
    return images


def _push(client: docker.DockerClient, repository: str, tag: str, say: Say) -> str:
    """Push one tag and return the digest that the registry gave it."""
    digest = ""
    for event in client.api.push(repository, tag, stream=True, decode=True):
        if "error" in event:
            raise UserError(f"image {repository}:{tag}: not pushed: {event['error']}")
        digest = event.get("aux", {}).get("Digest", digest)
        if event.get("status") and not event.get("progressDetail"):
            say(" ".join(filter(None, (f"{repository}:", event.get("id"), event["status"]))))
    return digest


def verify(client: docker.DockerClient) -> Iterator[tuple[str, str]]:
    """Yield (role, fault) for each image of ``images/lock.yaml`` that is not there or not of these sources.

    Fetches what this engine does not have yet. Raises :class:`UserError` when nothing is locked.
    """
    images = locked_images()
    if not images:
        raise UserError(f"{LOCK}: no such file; qdflash images lock REGISTRY writes it")
    for role, name in images.items():
        try:
            with _refusals("not in its registry"):
                client.images.get_registry_data(name)
            labels = find(client, name).labels
            lock = labels.get("org.opencontainers.image.title", "").removeprefix("qdflash-")
            if labels.get(SOURCES) != _sources(lock):
                yield role, "made from other files than these; build and lock it again"
        except UserError as fault:
            yield role, str(fault)


def _sources(lock: str) -> str:
    """Return the hash of what an image is made from: the build context without other locks and the README."""
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    context = sorted(path for path in exclude_paths(str(ROOT), patterns, DOCKERFILE) if (ROOT / path).is_file())
    digest = hashlib.sha256()
    for path in context:
        if path != "README.md" and (Path(path).parent.name != "locks" or Path(path).stem == lock):
            digest.update(f"{path}\0{hashlib.sha256((ROOT / path).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _revision() -> str:
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        return asked.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@contextlib.contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Turn what the engine or its registry refuses into one line."""
    try:
        yield
    except (DockerException, RequestException) as error:
        raise UserError(f"{what}: {explained(error)}") from error


def explained(error: Exception) -> str:
    """Return what a Docker engine said, in one line, without the address of its socket."""
    said = error.explanation if isinstance(error, APIError) else None
    return " ".join(str(said).split()) if said else one_line(error)
