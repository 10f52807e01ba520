"""The command as people call it: exit codes, one line, artifacts in a store."""

import errno
import io
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from typer.main import get_command

from components.contract.errors import UserError
from components.contract.invocation import Invocation
from components.store import cache
from components.store.artifact import commit, read_manifest, verify
from components.store.backend import Store
from components.store.lease import Lease
from pipelines import artifacts, doctor
from pipelines.cli import app, main, namesake
from pipelines.recipe import load_recipe
from pipelines.serve import demand_free
from tests.pipelines.planning import TINY

EMPTY = b'{"attempt": "x", "files": [], "metrics": {}}'


def qdflash(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process: another one costs seconds of imports."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["qdflash", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    return subprocess.CompletedProcess(arguments, ended.value.code, out.getvalue(), err.getvalue())


def commands(command: object, *path: str) -> Iterator[tuple[str, ...]]:
    """Yield the words that call a command and every one below it."""
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *path, name)


@pytest.mark.parametrize("path", list(commands(get_command(app))), ids=" ".join)
def test_every_command_prints_its_help(path: tuple[str, ...]) -> None:
    said = qdflash(*path, "--help")
    assert said.returncode == 0, said.stderr
    assert " ".join(("Usage: qdflash", *path)) in said.stdout


def test_the_command_is_a_process_of_its_own(tmp_path: Path, home: Path):
    command = [sys.executable, "-m", "pipelines.cli", "artifacts", "list", "nostage", "--store", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("qdflash: stage nostage: unknown")


@pytest.fixture
def filled(tmp_path: Path, home: Path) -> tuple[Store, dict[str, Invocation]]:
    """A folder store with a ``pack`` artifact and a ``bundle`` made from it."""
    store = Store(str(tmp_path / "store"))
    made = {}
    for stage, digest, inputs in (("pack", "a" * 64, {}), ("bundle", "b" * 64, {"target": ["pack"]})):
        folder = tmp_path / stage
        folder.mkdir()
        (folder / "weights.bin").write_bytes(stage.encode() * 1000)
        bound = {port: [made[one].uri for one in names] for port, names in inputs.items()}
        manifest = {"version": 1, "config": {}, "inputs": bound, "salt": None, "metrics": {"size": 1}, "phases": {}}
        manifest |= {"started": time.time(), "seconds": 1.5, "versions": {}}
        made[stage] = commit(store, stage, digest, folder, manifest)[0]
    return store, made


def test_list_show_and_verify(filled):
    store, made = filled
    listed = json.loads(qdflash("artifacts", "list", "--json", "--store", store.url).stdout)
    assert {(row["stage"], row["uri"]) for row in listed} == {(name, one.uri) for name, one in made.items()}
    shown = qdflash("artifacts", "show", "aaaa", "--json", "--store", store.url)
    assert json.loads(shown.stdout) == made["pack"].manifest
    assert "2 artifacts: every byte is as committed" in qdflash("artifacts", "verify", "--store", store.url).stdout
    store.write(made["pack"].key("weights.bin"), b"pack" * 999 + b"pacK")
    broken = qdflash("artifacts", "verify", "--store", store.url)
    assert broken.returncode == 2
    assert "weights.bin: sha256 differs" in broken.stderr
    assert qdflash("artifacts", "rm", "pack/aaaa", "--store", store.url).returncode == 0
    assert read_manifest(store, "pack", "a" * 64) is None


@pytest.mark.parametrize(
    "manifest", [b"", b'{"attempt": "x", "fi', b'{"attempt": "../../x", "files": []}', b"[1]", EMPTY]
)
def test_an_unreadable_manifest_is_named_and_can_be_removed(manifest: bytes, filled):
    store, _ = filled
    store.write(f"pack/{'a' * 64}/_manifest.json", manifest)
    listed = qdflash("artifacts", "list", "--store", store.url)
    assert listed.returncode == 2
    assert f"pack/{'a' * 64}: its manifest is not readable; remove it (qdflash artifacts rm" in listed.stderr
    assert qdflash("artifacts", "rm", f"pack/{'a' * 64}", "--store", store.url).returncode == 0
    assert qdflash("artifacts", "list", "--store", store.url).returncode == 0


def test_export(filled, tmp_path: Path):
    store, _ = filled
    target = tmp_path / "exported"
    assert qdflash("artifacts", "export", "bbbb", str(target), "--store", store.url).returncode == 0
    assert (target / "weights.bin").read_bytes() == b"bundle" * 1000
    (target / "weights.bin").write_bytes(b"writable")
    again = qdflash("artifacts", "export", "bbbb", str(target), "--store", store.url)
    assert again.returncode == 2
    assert "not an empty folder" in again.stderr


def test_gc_finds_what_nobody_needs_and_only_that(filled):
    store, _ = filled
    store.write(f"pack/{'c' * 64}/attempt/file", b"never committed")
    store.write(f"bundle/{'b' * 64}/other/file", b"a loser's attempt")
    store.write(f"_work/bundle/{'b' * 64}/parts/1", b"finished")
    store.write(f"_work/qad/{'d' * 64}/parts/1", b"to be resumed")
    Path(store.root, "_work", "pack", "a" * 64).mkdir(parents=True)  # as some stores leave one
    found = {one.key for one in artifacts.garbage(store)}
    assert found == {f"pack/{'c' * 64}", f"bundle/{'b' * 64}/other", f"_work/bundle/{'b' * 64}"}
    kept = {one.key for one in artifacts.garbage(store, ["b" * 64])}
    assert kept == found | {f"_work/qad/{'d' * 64}"}
    unreached = {one.key for one in artifacts.garbage(store, ["a" * 64])}
    assert f"bundle/{'b' * 64}" in unreached
    assert f"pack/{'a' * 64}" not in unreached
    artifacts.remove_garbage(store, artifacts.garbage(store))
    assert artifacts.garbage(store) == []
    assert len(list(artifacts.every(store))) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("plan", "smoll", "--store", "x"),
            "recipe smoll: no such file, and none of those that come with qdflash (qwen",
        ),
        (("plan", "none.yaml", "--store", "x"), "recipe none.yaml: No such file"),
        (("compile", "tiny", "-o", "x.yaml"), "pods cannot reach the local store"),
        (("submit", "tiny", "--host", "http://127.0.0.1:9"), "pods cannot reach the local store"),
        (("serve", "ffff", "--set", "qad.steps=1", "--store", "x"), "--set: ffff is no recipe"),
        (("artifacts", "show", "ffff", "--store", "nowhere"), "artifact ffff: no such artifact"),
        (("artifacts", "list", "nostage", "--store", "nowhere"), "stage nostage: unknown"),
        (("run", "tiny", "--force", "qad", "--only", "nothing", "--store", "x"), "nothing"),
        (
            ("serve", "tiny", "--set", "gptq.damping=0.05", "--store", "x"),
            "not made yet; qdflash run tiny --set gptq.damping=0.05",
        ),
        (("artifacts", "list", "--store", "gs://b"), "only s3://bucket/prefix and folders"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments: tuple[str, ...], says: str, tmp_path: Path, home: Path):
    result = qdflash(*arguments)
    assert result.returncode == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_no_command_imports_torch():
    code = (
        "import sys, pipelines.cli, pipelines.engine, pipelines.serve, pipelines.doctor; print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "False"


def test_an_export_that_fails_leaves_nothing(filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, _ = filled
    bundle = artifacts.find(store, "bbbb")
    cache.fetch(bundle)

    def full(source: str, target: str) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(UserError, match="not written"):
        artifacts.export(bundle, tmp_path / "exports" / "bundle")
    assert list((tmp_path / "exports").iterdir()) == []


def test_gc_drops_copies_of_data_sets_when_it_is_told_to(filled, monkeypatch: pytest.MonkeyPatch):
    store, _ = filled
    monkeypatch.setattr("components.store.lease.BEAT_SECONDS", 0.5)
    copies = "_datasets/owner/name/" + "e" * 40
    store.write(f"{copies}/data/stem.parquet/bytes", b"rows")
    store.write(f"{copies}/data/stem.parquet/index.json", b"{}")
    lease = Lease(store, f"_datasets/owner/name/{'f' * 40}/data/stem.parquet/lease.json")
    assert lease.acquire(lambda: False, print)
    assert artifacts.garbage(store) == artifacts.garbage(store, ["b" * 64]) == []
    collected = qdflash("artifacts", "gc", "--datasets", "--delete", "--store", store.url)
    assert f"removed {store.uri(copies)}: copy of a hub data set" in collected.stdout
    lease.release()
    assert store.keys("_datasets") == []


def test_gc_leaves_what_was_committed_after_it_looked(filled, tmp_path: Path):
    store, made = filled
    pack = made["pack"]
    manifest = store.read(f"pack/{pack.digest}/_manifest.json")
    store.delete(f"pack/{pack.digest}/_manifest.json")
    found = artifacts.garbage(store)
    assert f"pack/{pack.digest}" in {one.key for one in found}
    store.write(f"pack/{pack.digest}/_manifest.json", manifest)
    artifacts.remove_garbage(store, found)
    assert verify(pack, tmp_path) == []


def test_gc_looks_for_the_manifest_after_the_lease(filled, monkeypatch: pytest.MonkeyPatch):
    store, made = filled
    pack, is_worked_on = made["pack"], artifacts._is_worked_on
    manifest = store.read(f"pack/{pack.digest}/_manifest.json")
    store.delete(f"pack/{pack.digest}/_manifest.json")

    def commits_meanwhile(store: Store, stage: str, digest: str) -> bool:
        store.write(f"pack/{pack.digest}/_manifest.json", manifest)
        return is_worked_on(store, stage, digest)

    monkeypatch.setattr(artifacts, "_is_worked_on", commits_meanwhile)
    assert artifacts.garbage(store) == []


def test_a_refused_run_leaves_no_salt(tmp_path: Path, home: Path):
    store = Store(str(tmp_path / "store"))
    assert qdflash("run", "tiny", "--force", "qad", "--only", "nothing", "--store", store.url).returncode == 2
    assert store.keys("_salts") == []


def test_a_copied_recipe_of_the_same_name_is_told(tmp_path: Path, home: Path):
    copy = tmp_path / "copy.yaml"
    shutil.copyfile(TINY, copy)
    first, second = (load_recipe(path, [f"files.prompts=['{TINY}']"]) for path in (TINY, copy))
    assert [namesake(one) for one in (first, first, second, second)] == [None, None, TINY, None]
    copy.unlink()
    assert namesake(first) is None


def test_a_busy_port_is_named_at_once():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        with pytest.raises(UserError, match="already in use; end what listens there, or choose another"):
            demand_free(busy.getsockname()[1])


def test_an_interpreter_that_is_none_is_a_fault_in_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QDFLASH_PYTHON_TRAIN", "/bin/true")
    finding = doctor._role("train")
    assert finding.level == "fault"
    assert "does not run" in finding.says
