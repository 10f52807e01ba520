"""A state folder for the command; a Docker engine and a registry of these tests' own, with images of this machine."""

import functools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import docker
import pytest
from typer.testing import CliRunner

from pipelines import images
from pipelines.images_cli import app as images_app
from tests.e2e import machine, wheelhouse
from tests.e2e.command import QDFLASH

FORBIDDEN = ("not permitted", "permission denied", "not supported", "isn't mounted")
"""In dockerd's last words where the kernel, or the container that this runs in, refuses mounts or cgroups."""
ALONE = ("--iptables=false", "--ip6tables=false", "--bridge=none", "--ip-forward=false")


@pytest.fixture(scope="module")
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A state folder and a store of a module's own, as the environment of ``qdflash``."""
    folder = tmp_path_factory.mktemp("home")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "QDFLASH_"))} | {
        "QDFLASH_HOME": str(folder)
    }
    yield environment
    subprocess.run([QDFLASH, "store", "down"], env=environment, check=True, timeout=60)


@pytest.fixture(scope="session")
def docker_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[docker.DockerClient]:
    """dockerd on a private socket with a data folder of its own; it makes no bridge and no firewall rule."""
    daemon = shutil.which("dockerd")
    if daemon is None or os.getuid() != 0:
        pytest.skip("containers are tested by root with dockerd (Debian: apt-get install docker.io docker-registry)")
    folder = tmp_path_factory.mktemp("docker")
    arguments = ["--data-root", folder / "data", "--exec-root", folder / "exec", "-p", folder / "pid", *ALONE]
    address = f"unix://{folder}/socket"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [daemon, "-H", address, "--storage-driver", "overlay2", *arguments], stdout=log, stderr=log
        )
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_HOST", address)
            yield _answering(process, folder / "log")
    finally:
        process.terminate()
        process.wait(60)
        mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for left in (one for one in mounted if one.startswith(f"{folder}/")):  # a network namespace stays
            subprocess.run(["umount", left], check=True)
        shutil.rmtree(folder)


def _answering(process: subprocess.Popen[bytes], log: Path) -> docker.DockerClient:
    for _ in range(300):
        if process.poll() is not None:
            last = log.read_text().splitlines()[-1]
            if any(one in last for one in FORBIDDEN):
                pytest.skip(f"dockerd is not let run here: {last}")
            break
        try:
            return images.engine()
        except images.UserError:
            time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Debian's docker-registry on a free port: its address."""
    server = shutil.which("docker-registry")
    if server is None:
        pytest.skip("no docker-registry (Debian: apt-get install docker-registry)")
    folder = tmp_path_factory.mktemp("registry")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (folder / "config.yml").write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\nhttp: {{addr: '{address}'}}\n"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([server, "serve", folder / "config.yml"], stdout=log, stderr=log)
    try:
        for _ in range(100):
            if b"listening on" in (folder / "log").read_bytes():
                break
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def base_image(docker_engine: docker.DockerClient) -> str:
    """This machine's Python as an image."""
    return machine.base(docker_engine)


@pytest.fixture(scope="session")
def builder_image(docker_engine: docker.DockerClient, base_image: str) -> str:
    """The base with pip, for the steps that install."""
    return machine.builder(docker_engine)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What images are built from."""
    copy = tmp_path_factory.mktemp("checkout")
    for part in ("components", "pipelines", "locks", "images"):
        shutil.copytree(machine.ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "lock.yaml"))
    for part in (".dockerignore", "pyproject.toml", "README.md"):
        shutil.copy(machine.ROOT / part, copy / part)
    return copy


@pytest.fixture(scope="session")
def wheels(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Future[Path]]]:
    """Begin to fetch the wheels of a role's lock, once; that is mostly waiting, so roles may be asked for ahead."""
    with ThreadPoolExecutor() as pool:

        @functools.cache
        def asked(role: str) -> Future[Path]:
            lock = checkout / "locks" / ("core.txt" if role == "core" else f"{role}-cpu.txt")
            return pool.submit(wheelhouse.fetch, lock, tmp_path_factory.mktemp("wheels"))

        yield asked


@pytest.fixture(scope="session")
def role_image(
    docker_engine: docker.DockerClient,
    base_image: str,
    builder_image: str,
    checkout: Path,
    wheels: Callable[[str], Future[Path]],
) -> Callable[[str], str]:
    """Return a role's image as ``NAME@sha256:ID``: built as a user builds it, from its committed lock, once."""

    @functools.cache
    def built(role: str) -> str:
        words = ["build", "--base", base_image, "--builder", builder_image, "--role", role, "--accelerator", "cpu"]
        folder = wheels(role).result()
        docker_engine.images.prune()  # the layers that other roles' packages were installed in: as large as the images
        with wheelhouse.serving(folder) as address, pytest.MonkeyPatch.context() as patch:
            for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
                patch.delenv(name, raising=False)
            patch.setenv("PIP_NO_INDEX", "1")
            patch.setenv("PIP_FIND_LINKS", address)
            patch.setattr(images, "ROOT", checkout)
            done = CliRunner().invoke(images_app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        shutil.rmtree(folder)
        return done.stdout.strip().splitlines()[-1].split()[1]

    return built


@pytest.fixture(scope="session")
def core_image(role_image: Callable[[str], str]) -> str:
    """The image of ``core``."""
    return role_image("core")
