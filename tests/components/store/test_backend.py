"""A folder and S3 behave the same, and their failures are one line with the right exit code."""

import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from components.contract.errors import TransientError, UserError
from components.store.backend import Store


def test_bytes_come_back_and_missing_is_none(store: Store):
    assert store.read("a/b") is None
    assert store.size("a/b") is None
    store.write("a/b", b"one")
    store.write("a/b", b"second")
    assert store.read("a/b") == b"second"
    assert store.read("a/b", first=3) == b"sec"
    assert store.read("a/b", first=99) == b"second"
    assert store.size("a/b") == 6
    assert Store(store.url).read("a/b") == b"second"


def test_create_only_when_absent(store: Store):
    assert store.create("x/y", b"first")
    assert not store.create("x/y", b"other")
    assert store.read("x/y") == b"first"


def test_replace_only_what_is_expected(store: Store):
    assert not store.replace("k/v", b"", b"new")
    store.write("k/v", b"old")
    assert not store.replace("k/v", b"wrong", b"new")
    assert store.replace("k/v", b"old", b"new")
    assert store.read("k/v") == b"new"


def test_listing_stays_inside_the_folder(store: Store):
    for key in ("w/1/a", "w/1/b/c", "w/10/a", "w1/a"):
        store.write(key, b"-")
    assert store.keys("w/1") == ["w/1/a", "w/1/b/c"]
    assert store.folders("w") == ["1", "10"]
    assert store.folders("") == ["w", "w1"]
    assert store.keys("nothing") == []
    assert store.folders("nothing") == []


def test_delete_takes_an_object_or_a_folder_and_nothing_beside_it(store: Store):
    for key in ("w/1/a", "w/1/b/c", "w/10/a", "w/lone", "w/lone2"):
        store.write(key, b"-")
    store.delete("w/1")
    store.delete("w/lone")
    store.delete("w/never-there")
    assert store.keys("w") == ["w/10/a", "w/lone2"]


@pytest.mark.slow
def test_more_than_a_page_of_objects(store: Store):
    for number in range(1005):
        store.write(f"many/{number:05}", b"")
    assert len(store.keys("many")) == 1005
    store.delete("many")
    assert store.keys("many") == []


def test_names_with_magic_characters(store: Store, tmp_path: Path):
    store.write("m/a[1]*", b"1")
    store.write("m/a1", b"2")
    assert store.read("m/a[1]*") == b"1"
    store.delete("m/a[1]*")
    assert store.keys("m") == ["m/a1"]


def test_sixteen_threads_one_creator(store: Store):
    won, barrier = [], threading.Barrier(16)

    def attempt(number: int) -> None:
        mine = Store(store.url)
        barrier.wait()
        if mine.create("race", f"writer {number}".encode()):
            won.append(number)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read("race") == f"writer {won[0]}".encode()


def test_eight_threads_one_replacer(store: Store):
    store.write("race", b"start")
    won, barrier = [], threading.Barrier(8)

    def attempt(number: int) -> None:
        mine = Store(store.url)
        barrier.wait()
        if mine.replace("race", b"start", f"writer {number}".encode()):
            won.append(number)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read("race") == f"writer {won[0]}".encode()


def test_files_stream_both_ways(store: Store, tmp_path: Path):
    source = tmp_path / "source"
    source.write_bytes(os.urandom(3 << 20))
    store.upload(source, "f/file.bin")
    store.download("f/file.bin", tmp_path / "deep" / "copy")
    assert (tmp_path / "deep" / "copy").read_bytes() == source.read_bytes()
    (tmp_path / "empty").touch()
    store.upload(tmp_path / "empty", "f/empty")
    assert store.size("f/empty") == 0


@pytest.mark.slow
def test_a_multipart_file_keeps_its_bytes(store: Store, tmp_path: Path):
    source = tmp_path / "source"
    block = os.urandom(1 << 20)
    with source.open("wb") as file:
        for number in range(131):
            file.write(number.to_bytes(4, "big") + block[4:])
    store.upload(source, "big")
    store.download("big", tmp_path / "copy")
    assert subprocess.run(["cmp", source, tmp_path / "copy"], check=False).returncode == 0


def test_wrong_secret(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for call in (
        lambda store: store.read("a"),
        lambda store: store.write("a", b"1"),
        lambda store: store.create("a", b"1"),
        lambda store: store.keys("a"),
    ):
        with pytest.raises(UserError, match="s3://qdflash/x: access to a refused; check the credentials"):
            call(Store("s3://qdflash/x"))


def test_missing_bucket(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    store = Store("s3://no-such-bucket/x")
    with pytest.raises(UserError, match="no bucket no-such-bucket"):
        store.write("a", b"1")
    with pytest.raises(UserError, match="no bucket no-such-bucket"):
        store.create("a", b"1")
    with pytest.raises(UserError, match="no bucket NOT_A_NAME"):
        Store("s3://NOT_A_NAME/x").write("a", b"1")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gs://b", "gs://b: only s3://bucket/prefix and folders"),
        ("/", "names no bucket or folder"),
        ("s3://", "names no bucket or folder"),
    ],
)
def test_what_is_no_store_is_refused(url: str, says: str):
    with pytest.raises(UserError, match=says):
        Store(url)


def test_a_profile_that_is_not_there(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(UserError, match=r"nobody.*correct the address or the AWS_\* settings"):
        Store("s3://qdflash/x").read("a")


@pytest.mark.slow
def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, s3: dict[str, str]):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        _expect_unreachable(monkeypatch, s3, unused.getsockname()[1])


@pytest.mark.slow
def test_connections_are_swallowed(monkeypatch: pytest.MonkeyPatch, s3: dict[str, str]):
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        _expect_unreachable(monkeypatch, s3, full.getsockname()[1])
        for filler in fillers:
            filler.close()


def _expect_unreachable(monkeypatch: pytest.MonkeyPatch, s3: dict[str, str], port: int) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://someone:secret@127.0.0.1:{port}")
    start = time.monotonic()
    with pytest.raises(TransientError, match=f"no answer from endpoint http://127.0.0.1:{port}"):
        Store("s3://qdflash/x").read("a")
    assert time.monotonic() - start < 20


def test_full_disk_leaves_nothing_visible(small_disk: Path, tmp_path: Path):
    source = tmp_path / "source"
    source.write_bytes(bytes(2 << 20))
    store = Store(str(small_disk / "store"))
    with pytest.raises(UserError, match="disk full while writing a/file"):
        store.upload(source, "a/file")
    with pytest.raises(UserError, match="disk full while writing a/other"):
        store.create("a/other", bytes(2 << 20))
    assert store.keys("a") == []
    assert [path for path in small_disk.rglob("*") if path.is_file()] == []


def test_an_address_that_lacks_a_slash_is_refused():
    with pytest.raises(UserError, match="one slash too few"):
        Store("s3:/bucket/runs")


def test_credentials_in_an_address_are_refused_and_not_repeated():
    with pytest.raises(UserError, match="holds credentials") as refusal:
        Store("s3://user:pw@bucket/runs")
    assert "pw@" not in str(refusal.value)


def test_a_full_disk_here_is_not_the_store_s(tmp_path: Path):
    store = Store(str(tmp_path / "store"))
    store.write("key", b"bytes")
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(UserError, match="full: disk full while fetching"):
        store.download("key", tmp_path / "full")
