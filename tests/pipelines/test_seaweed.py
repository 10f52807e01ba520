"""The local S3 server: quick, private, and nothing is lost."""

import json
import os
import signal
import stat
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from components.contract.errors import UserError
from components.store.backend import Store
from pipelines import seaweed


@pytest.fixture
def ended(home: Path):
    """End this test's own server, whatever state the test left it in."""
    yield home
    pid = seaweed.status()["pid"]
    if pid:
        os.kill(pid, signal.SIGKILL)


def use(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> Store:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return Store(seaweed.DEFAULT_STORE)


@pytest.mark.slow
def test_up_is_idempotent_survives_kill_9_and_a_taken_port(ended: Path, monkeypatch: pytest.MonkeyPatch):
    environment = seaweed.up()
    store = use(monkeypatch, environment)
    for number in range(50):
        store.write(f"small/{number:02}", f"{number}".encode())
    start = time.monotonic()
    assert seaweed.up() == environment
    assert time.monotonic() - start < 1
    pid = seaweed.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    start = time.monotonic()
    assert seaweed.up() == environment  # the same ports and key
    assert time.monotonic() - start < 45  # 14 s on an idle machine
    assert [store.read(key) for key in store.keys("small")] == [f"{number}".encode() for number in range(50)]
    os.kill(seaweed.status()["pid"], signal.SIGKILL)
    os.waitpid(json.loads((ended / "store" / "server.json").read_text())["pid"], 0)
    import socket

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", int(environment["AWS_ENDPOINT_URL_S3"].rsplit(":", 1)[1])))
        taken.listen()
        moved = seaweed.up()
    assert moved["AWS_ENDPOINT_URL_S3"] != environment["AWS_ENDPOINT_URL_S3"]
    assert len(use(monkeypatch, moved).keys("small")) == 50
    forgotten = (ended / "store" / "server.json").rename(ended / "elsewhere")
    with pytest.raises(UserError, match=r"a weed that server\.json does not name runs there"):
        seaweed.up()
    forgotten.rename(ended / "store" / "server.json")
    assert seaweed.up() == moved


@pytest.mark.slow
def test_two_projects_side_by_side_and_closed_side_doors(
    s3: dict[str, str], ended: Path, monkeypatch: pytest.MonkeyPatch
):
    environment = seaweed.up()
    assert environment["AWS_ENDPOINT_URL_S3"] != s3["AWS_ENDPOINT_URL_S3"]
    use(monkeypatch, environment).write("mine", b"1")
    assert use(monkeypatch, s3).read("mine") is None
    use(monkeypatch, environment)
    ports = json.loads((ended / "store" / "server.json").read_text())["ports"]
    for url in (
        f"http://127.0.0.1:{ports['filer']}/buckets/qdflash/runs/mine",
        f"http://127.0.0.1:{ports['volume']}/1,0163",
    ):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url)
    for name in ("s3.json", "security.toml"):
        assert stat.S_IMODE((ended / "store" / name).stat().st_mode) == 0o600


def test_a_recycled_pid_is_never_killed(home: Path):
    folder = home / "store"
    folder.mkdir()
    server = {"pid": os.getpid(), "start_time": "1", "ports": {"s3": 1}}
    (folder / "server.json").write_text(json.dumps(server))
    assert not seaweed.status()["running"]
    assert not seaweed.down()


@pytest.mark.parametrize("text", ["5", '"x"', '{"pid": 1}', "[]"])
def test_a_damaged_server_file_is_named(home: Path, text: str):
    (home / "store").mkdir()
    (home / "store" / "server.json").write_text(text)
    with pytest.raises(UserError, match=r"server\.json: not readable"):
        seaweed.status()


@pytest.mark.parametrize("text", ["[]", "{}", '{"identities": []}'])
def test_a_damaged_key_file_is_named(home: Path, text: str):
    (home / "store").mkdir()
    (home / "store" / "s3.json").write_text(text)
    with pytest.raises(UserError, match=r"s3\.json: not readable"):
        seaweed.up()


def test_a_comma_in_the_home_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "a,b"))
    with pytest.raises(UserError, match="choose another"):
        seaweed.up()
