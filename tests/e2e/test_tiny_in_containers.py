"""The tiny recipe, whole, in containers: images of all three roles from the committed locks, and a real S3 server."""

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import docker
import pytest

from pipelines import containers, seaweed
from pipelines.interpreters import ROLES
from tests.e2e.command import qdflash
from tests.images.test_sizes import TABLE

pytestmark = pytest.mark.slow
ROOM = 15 * 10**9
"""Bytes that wheels, images and their building take at most at once."""
FEWER = (
    "teacher.source.steps=100",
    "prompts_a.count=40",
    "qad.steps=16",
    "drafter.epochs=5",
    "gate.rules=[{name: parity, metric: measure_pair.parity.passed, at_least: 1}]",
)
"""What training achieves is tests/e2e/test_tiny.py's; here every stage has to run."""


def test_every_stage_runs_in_the_image_of_its_role(
    docker_engine: docker.DockerClient,
    wheels: Callable[[str], Future[Path]],
    role_image: Callable[[str], str],
    s3: dict[str, str],
    home: Path,
) -> None:
    if (free := shutil.disk_usage(home).free) < ROOM:
        pytest.skip(f"images of all roles need {ROOM / 1e9:.0f} GB of disk, {free / 1e9:.0f} are free")
    for role in ROLES:
        wheels(role)
    images = {role: role_image(role) for role in ROLES}
    base = docker_engine.images.get("qdflash-test-base").attrs["Size"]
    for role, told, budget, *_ in TABLE:
        size = (docker_engine.images.get(images[role].partition("@")[2]).attrs["Size"] - base) / 1e6
        assert size <= int(budget)
        assert size == pytest.approx(int(told), rel=0.1)
    words = ["--store", f"s3://{seaweed.BUCKET}/{home.parent.name}"]
    for change in (*FEWER, *(f"cluster.images.{role}={image}" for role, image in images.items())):
        words += ["--set", change]
    environment = os.environ | s3
    qdflash(environment, "run", "tiny", "--engine", "docker", *words)
    planned = json.loads(qdflash(environment, "plan", "tiny", "--json", *words).stdout)
    tasks = {task["name"]: task for task in planned["tasks"]}
    assert {name for name, task in tasks.items() if task["state"] != "cached"} <= {"deploy"}
    assert {task["role"] for task in tasks.values()} == set(ROLES)
    logs = {name: home / "logs" / "tiny" / f"{name}.log" for name in tasks}
    before = {name: log.read_text() for name, log in logs.items()}
    for name, task in tasks.items():
        assert f": {images[task['role']]} python -m components.{task['stage']}" in before[name]
    qdflash(environment, "run", "tiny", "--engine", "docker", *words)
    assert {name for name, log in logs.items() if log.read_text() != before[name]} == {"gate", "deploy"}
    assert docker_engine.containers.list(all=True) == []
    docker_engine.volumes.get(containers.VOLUME).remove()
