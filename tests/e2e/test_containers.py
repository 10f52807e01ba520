"""Images, and the probe stage in containers, on a real Docker engine, a real registry and a real S3 server."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from typer.testing import CliRunner

from components.contract.errors import UserError
from components.store.artifact import read_manifest
from components.store.backend import Store
from components.store.work import Work
from pipelines import cluster, containers, images, seaweed
from pipelines import engine as engine_module
from pipelines.cluster import Cluster, Images, Placement
from pipelines.containers import Containers
from pipelines.images_cli import app
from pipelines.plan import Plan
from tests.conftest import Probe
from tests.pipelines.planning import Builder

pytestmark = pytest.mark.slow
HARDENED = {"read_only": True, "cap_drop": ["ALL"], "network_mode": "none", "tmpfs": {"/tmp": ""}, "remove": True}


def test_a_built_image_runs_a_stage_read_only(docker_engine: docker.DockerClient, core_image: str) -> None:
    image = images.find(docker_engine, core_image)
    assert image.labels["org.opencontainers.image.title"] == "qdflash-core"
    assert image.labels["org.opencontainers.image.base.digest"] == docker_engine.images.get("qdflash-test-base").id
    said = docker_engine.containers.run(image.id, ["-m", "components.prompts", "--help"], **HARDENED).decode()
    assert said.startswith("usage: python -m components.prompts")
    ask = "import os, components; print(os.getuid(), components.__file__)"
    answer = docker_engine.containers.run(image.id, ["-c", ask], **HARDENED).split()
    assert answer == [b"65532", b"/opt/qdflash/components/__init__.py"]


def test_a_step_that_fails_is_named(
    docker_engine: docker.DockerClient,
    base_image: str,
    builder_image: str,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "ROOT", checkout)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # and no wheels
    with pytest.raises(UserError, match=r"non-zero code: 1; the step's last words: .*No matching distri") as failed:
        images.build(docker_engine, "core", "cpu", base_image, builder_image, lambda _: None)
    assert "\x1b" not in str(failed.value)


def test_locked_images_are_checked_and_found_by_recipes(
    docker_engine: docker.DockerClient,
    core_image: str,
    registry: str,
    checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "ROOT", checkout)
    monkeypatch.setattr(images, "ROLES", ("core",))  # whatever else was built: a gigabyte is enough to push
    monkeypatch.setattr(cluster, "LOCK", tmp_path / "lock.yaml")
    monkeypatch.setattr(images, "LOCK", tmp_path / "lock.yaml")

    def called(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, words)
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.stdout

    with pytest.raises(UserError, match="qdflash images lock REGISTRY writes it"):
        called("verify")
    code, said = called("lock", f"{registry}/team")
    name = said.split()[-1]
    assert (code, cluster.locked_images()) == (0, {"core": name})
    assert name.startswith(f"{registry}/team/qdflash-core@sha256:")
    assert called("verify")[0] == 0
    for known in docker_engine.images.get(name).tags:
        if known.startswith(registry):
            docker_engine.images.remove(known)
    assert images.find(docker_engine, name).id == core_image.partition("@")[2]  # fetched by its digest

    copy = shutil.copytree(checkout, tmp_path / "copy")
    monkeypatch.setattr(images, "ROOT", copy)
    assert called("verify")[0] == 0
    with (copy / "locks" / "train-gpu.txt").open("a") as other:
        other.write("# of no matter to core\n")
    assert called("verify")[0] == 0
    with (copy / "components" / "gate" / "stage.py").open("a") as code_file:
        code_file.write("# changed\n")
    assert called("verify") == (2, "core: made from other files than these; build and lock it again\n")
    (tmp_path / "lock.yaml").write_text(f"core: {name[:-4]}beef\n")
    code, said = called("verify")
    assert code == 2
    assert "not in its registry" in said


@pytest.fixture
def builder(
    docker_engine: docker.DockerClient,
    core_image: str,
    probe: Probe,
    s3: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Builder]:
    """Plans of probes that run in an image of core with the probe stage in it."""
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(engine_module, "PAUSE_SECONDS", 0.1)
    context = shutil.copytree(tmp_path / "path", tmp_path / "context")  # not below /tmp: in a container that is empty
    stage = context / "probe.py"
    stage.write_text(stage.read_text().replace(str(tmp_path / "path"), "/opt/probe"))
    (context / "Dockerfile").write_text(
        "FROM qdflash-core\nCOPY . /opt/probe\nENV PYTHONPATH=/opt/qdflash:/opt/probe PROBE_TRACE=/state/trace\n"
    )
    image, _ = docker_engine.images.build(path=str(context), tag="qdflash-test-probe", rm=True)
    chosen = Cluster(images=Images(core=f"qdflash-test-probe@{image.id}"))
    yield Builder(probe, Store(f"s3://{seaweed.BUCKET}/{tmp_path.name}"), chosen, Containers)
    assert docker_engine.containers.list(all=True) == []
    docker_engine.images.remove(image.id, force=True)
    for volume in docker_engine.volumes.list():
        volume.remove()


def running(client: docker.DockerClient, seconds: float = 60.0) -> docker.models.containers.Container:
    """Wait for the one container that runs."""
    for _ in range(int(seconds / 0.05)):
        if found := client.containers.list():
            return found[0]
        time.sleep(0.05)
    raise AssertionError("no container runs")


def committed_parts(builder: Builder, task: str) -> list[str]:
    """Return the parts of work that a probe has put into the store."""
    return Work(builder.store, f"_work/probe/{builder.tasks[task].digest}").names()


def trace(client: docker.DockerClient) -> list[str]:
    """Return what the probes did, in order, from the volume that their containers share."""
    volume = {containers.VOLUME: {"bind": "/state", "mode": "ro"}}
    said = client.containers.run(
        "qdflash-test-probe", ["/state/trace"], entrypoint="cat", volumes=volume, network_mode="none", remove=True
    )
    return str(said.decode()).splitlines()


def wait_for_parts(builder: Builder, task: str, count: int) -> None:
    for _ in range(400):
        if len(committed_parts(builder, task)) >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"{task} put no {count} parts")


def test_tasks_run_in_order_and_end_with_the_stages_own_codes(builder: Builder, home: Path) -> None:
    builder.add("a", steps=1)
    builder.add("b", needs=["a"], steps=1)
    builder.add("gate", needs=["a"], fail="GateError", steps=0)
    builder.add("below", needs=["gate"])
    builder.add("once", fail="FailOnce", steps=1)
    code, states, text = builder.run()
    assert code == 3
    assert states == {"a": "done", "b": "done", "gate": "failed", "below": "not run", "once": "done"}
    assert "probe: told to fail; do not tell it to" in text
    artifact = read_manifest(builder.store, "probe", builder.tasks["b"].digest)
    assert artifact is not None
    assert builder.store.read(artifact.key("text.txt")) == b"b a"
    log = (home / "logs" / "probe" / "once.log").read_text()
    assert log.count("=== ") == 2
    assert "progress done=1 total=1" in log
    for fail, expected in (("UserError", 2), ("Bug", 1)):
        builder.tasks.clear()
        builder.add("x", fail=fail, steps=0)
        assert builder.run()[:2] == (expected, {"x": "failed"})


def test_a_container_is_shut_in(builder: Builder, docker_engine: docker.DockerClient, monkeypatch) -> None:
    monkeypatch.setenv("OF_NO_CONCERN", "1")
    builder.add("a", steps=2, seconds=1.5, cpu=1, memory_gb=0.5)
    process = started(builder)
    attributes = running(docker_engine).attrs
    command, host = json.dumps([attributes["Path"], attributes["Args"]]), attributes["HostConfig"]
    inside = attributes["Config"]
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in command
    assert f"AWS_SECRET_ACCESS_KEY={os.environ['AWS_SECRET_ACCESS_KEY']}" in inside["Env"]
    assert not [one for one in inside["Env"] if one.startswith("OF_NO_CONCERN")]
    assert [(mount["Type"], mount["Name"]) for mount in attributes["Mounts"]] == [("volume", containers.VOLUME)]
    assert (host["ReadonlyRootfs"], host["CapDrop"], inside["User"]) == (True, ["ALL"], "65532:65532")
    assert (host["NanoCpus"], host["Memory"], host["Privileged"]) == (10**9, 500_000_000, False)
    assert process.wait(60) == 0


SCRIPT = """
import sys, pickle
import components
from rich.console import Console
components.__path__.append(sys.argv[2])
from pipelines.containers import Containers
from pipelines.engine import Engine
from pipelines.progress import Display
plan = pickle.load(open(sys.argv[1], "rb"))
raise SystemExit(Engine(plan, Display(Console()), Containers(plan)).run())
"""


def started(builder: Builder) -> subprocess.Popen[str]:
    """Start an engine in a process of its own."""
    import pickle

    folder = builder.probe.trace_path.parent
    (folder / "plan").write_bytes(pickle.dumps(builder.plan()))
    argv = [sys.executable, "-c", SCRIPT, str(folder / "plan"), str(folder / "path" / "components")]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ending_the_engine_ends_the_container_and_the_next_run_continues(
    number: signal.Signals, builder: Builder, docker_engine: docker.DockerClient
) -> None:
    builder.add("a", steps=5, seconds=1.0)
    process = started(builder)
    wait_for_parts(builder, "a", 2)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert "Traceback" not in output
    if number == signal.SIGINT:
        assert process.returncode == 75
        assert docker_engine.containers.list(all=True) == []
    else:
        assert docker_engine.containers.list(all=True) != []  # nobody was left to end it: the next run does
    builder_continues(builder, docker_engine)


def builder_continues(builder: Builder, client: docker.DockerClient) -> None:
    """Run again, and see that nothing was done twice but what was under way."""
    assert 2 <= len(committed_parts(builder, "a")) < 5
    began = time.monotonic()
    assert builder.run()[:2] == (0, {"a": "done"})
    assert time.monotonic() - began < 30  # the dead container's lease was not waited for
    steps = trace(client)
    assert set(steps) == {f"a {step}" for step in range(5)}
    assert len(steps) <= 6


def test_a_killed_container_is_a_failed_stage_and_the_next_run_continues(
    builder: Builder, docker_engine: docker.DockerClient
) -> None:
    builder.add("a", steps=5, seconds=1.0)
    process = started(builder)
    wait_for_parts(builder, "a", 2)
    running(docker_engine).kill("SIGKILL")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "signal 9; run again to continue" in output
    builder_continues(builder, docker_engine)


def test_limits_bite_or_are_refused(builder: Builder, docker_engine: docker.DockerClient) -> None:
    builder.add("large", steps=0, size=400_000_000, memory_gb=0.2)
    code, states, text = builder.run()
    assert (code, states) == (2, {"large": "failed"})
    assert "needs more than its 0.2 GB of memory; raise resources.large.memory_gb" in text
    builder.cluster = Cluster(images=builder.cluster.images, tasks={"large": Placement(memory="50M")})
    assert "needs more than its 0.05 GB of memory; raise cluster.tasks.large.memory" in builder.run()[2]
    for placement, fault in (
        ({"cpu": "999"}, "asks for 999 CPUs"),
        ({"memory": "999Gi"}, "asks for .* 1073 GB"),
        ({"gpus": 1}, "no NVIDIA runtime"),
        ({"gpus": 1, "gpu_resource": "amd.com/gpu"}, r"gpu_resource: amd\.com/gpu"),
        ({"secrets": {"hub": {"token": "A_TOKEN_NOBODY_SET"}}}, "A_TOKEN_NOBODY_SET: not set"),
    ):
        builder.cluster = Cluster(images=builder.cluster.images, roles={"core": Placement(**placement)})
        with pytest.raises(UserError, match=fault):
            builder.run()
    assert docker_engine.containers.list(all=True) == []


def test_what_cannot_run_in_containers_is_said_first(builder: Builder, tmp_path: Path) -> None:
    builder.add("a")
    with pytest.raises(UserError, match="containers see no folder of this machine"):
        Containers(Plan("probe", str(tmp_path), (), Cluster())).check([])
    builder.cluster = Cluster()
    with pytest.raises(UserError, match=r"cluster\.images\.core: not given"):
        builder.run()
    builder.cluster = Cluster(images=Images(core=f"127.0.0.1:9/gone@sha256:{'0' * 64}"))
    with pytest.raises(UserError, match=r"image 127\.0\.0\.1:9/gone@sha256"):
        builder.run()
