"""Real processes of a stage: commit, memoise, race, be killed, fail in one line."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.contract.arguments import bind, parser
from components.contract.errors import UserError
from components.contract.stage import STAGES, load
from components.store import cache
from components.store.artifact import commit, read_manifest, verify
from components.store.backend import Store
from components.store.lease import TTL_SECONDS
from tests.conftest import Probe, open_store

MANIFEST = b'{"attempt": "x", "files": [{"path": "f", "size": 1, "sha256": ""}], "metrics": {}}'


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Both kinds of store; S3 costs every process of these tests about a second."""
    return open_store(request, tmp_path, monkeypatch)


def committed(store: Store, digest: str):
    artifact = read_manifest(store, "probe", digest)
    assert artifact is not None
    return artifact


def wait_for(condition, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def one_line_error(result: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_commit_then_memoise(store: Store, probe: Probe):
    call = probe.invocation(store, size=1000)
    first = probe.run(call.argv)
    assert first.returncode == 0, first.stderr
    artifact = committed(store, call.digest)
    assert artifact.uri == call.uri
    assert [entry["path"] for entry in artifact.files] == ["sub/big.bin", "text.txt"]
    assert artifact.metrics == {"length": 5}
    assert artifact.manifest["config"]["steps"] == 2
    assert (cache.fetch(artifact) / "text.txt").read_text() == "hello"
    assert store.keys("_work") == []
    again = probe.run(call.argv)
    assert again.returncode == 0
    assert " cached " in again.stderr
    assert probe.trace() == ["hello 0", "hello 1"]


@pytest.mark.slow
def test_a_memoised_stage_is_quick_and_imports_nothing_heavy(store: Store, probe: Probe):
    call = probe.invocation(store)
    assert probe.run(call.argv).returncode == 0
    result = probe.run(("-X", "importtime", *call.argv))
    assert result.returncode == 0
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in result.stderr.splitlines() if "|" in line}
    assert "components" in imported
    assert not imported & {"torch", "vllm", "transformers", "numpy", "datasets"}
    # Under 2 s on an idle core; measured against the store client's own import, so that a busy machine cannot fail it.
    imports = min(_cpu_seconds(probe, ("-c", "import pydantic, s3fs, fsspec")) for _ in range(2))
    memoised = min(_cpu_seconds(probe, call.argv) for _ in range(2))
    assert memoised < 1.5 * imports + 0.5


def _cpu_seconds(probe: Probe, argv: tuple[str, ...]) -> float:
    before = os.times()
    assert probe.run(argv).returncode == 0
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_inputs_arrive_verified(store: Store, probe: Probe):
    first, second = probe.invocation(store, text="one"), probe.invocation(store, text="two")
    for call in (first, second):
        assert probe.run(call.argv).returncode == 0
    both = probe.invocation(store, {"before": [first.uri, second.uri]}, text="zero")
    result = probe.run(both.argv)
    assert result.returncode == 0, result.stderr
    artifact = committed(store, both.digest)
    assert (cache.fetch(artifact) / "text.txt").read_text() == "zero one two"
    assert artifact.manifest["inputs"] == {"before": [first.uri, second.uri]}


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_input_is_refused_by_name(damage: str, store: Store, probe: Probe):
    first = probe.invocation(store, size=5000)
    assert probe.run(first.argv).returncode == 0
    artifact = committed(store, first.digest)
    key = artifact.key("sub/big.bin")
    data = bytearray(store.read(key) or b"")
    data[2500] ^= 1
    if damage == "remove":
        store.delete(key)
    else:
        store.write(key, bytes(data) if damage == "flip" else bytes(data[:2500]))
    shutil.rmtree(Path(os.environ["QDFLASH_HOME"]) / "cache")  # the machine that made it still holds good copies
    result = probe.run(probe.invocation(store, {"before": [first.uri]}).argv)
    assert result.returncode == 2
    error = one_line_error(result)
    assert "sub/big.bin" in error
    assert first.uri in error
    assert len(verify(artifact, Path(os.environ["QDFLASH_HOME"]))) == 1


def test_what_was_made_here_is_not_fetched_again(store: Store, probe: Probe):
    first = probe.invocation(store, size=5000)
    assert probe.run(first.argv).returncode == 0
    artifact = committed(store, first.digest)
    store.delete(artifact.key("sub/big.bin"))
    assert probe.run(probe.invocation(store, {"before": [first.uri]}).argv).returncode == 0
    assert (cache.fetch(artifact) / "sub/big.bin").stat().st_mode & 0o222 == 0


def test_an_input_that_is_not_there(store: Store, probe: Probe):
    missing = store.uri("probe/" + "0" * 64)
    result = probe.run(probe.invocation(store, {"before": [missing]}).argv)
    assert result.returncode == 2
    assert f"input {missing}: nothing is committed there" in one_line_error(result)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda argv: (*argv[: argv.index("--config") + 1], '{"texd": "x"}', *argv[argv.index("--config") + 2 :]),
            "texd: unknown field, did you mean text?",
        ),
        (
            lambda argv: (*argv[: argv.index("--config") + 1], '{"steps": -1}', *argv[argv.index("--config") + 2 :]),
            "steps",
        ),
        (lambda argv: (*argv, "--salt", "abc"), "planner and stage are of different versions"),
        (lambda argv: (*argv, "--input", "nothing=x"), "--input nothing=x"),
    ],
)
def test_a_wrong_call_names_what_is_wrong(change, says: str, probe: Probe, tmp_path: Path):
    store = Store(str(tmp_path / "store"))
    result = probe.run(change(probe.invocation(store).argv))
    assert result.returncode == 2
    assert says in one_line_error(result)
    assert store.keys("probe") == []


@pytest.mark.parametrize(
    ("error", "code"), [("UserError", 2), ("GateError", 3), ("TransientError", 75), ("Import", 2), ("Bug", 1)]
)
def test_exit_codes_and_nothing_visible(error: str, code: int, store: Store, probe: Probe):
    call = probe.invocation(store, fail=error)
    result = probe.run(call.argv)
    assert result.returncode == code
    assert read_manifest(store, "probe", call.digest) is None
    assert store.keys("probe") == []
    assert store.read(f"_work/probe/{call.digest}/_lease.json") is None
    assert len(store.keys(f"_work/probe/{call.digest}")) == 2


@pytest.mark.slow
def test_kill_9_then_the_next_run_takes_over_at_once_and_redoes_only_what_was_in_flight(store: Store, probe: Probe):
    call = probe.invocation(store, steps=4, seconds=0.5)
    process = probe.start(call.argv)
    wait_for(lambda: len(probe.trace()) == 2)
    process.kill()
    process.communicate()
    assert store.read(f"_work/probe/{call.digest}/_lease.json")
    start = time.monotonic()
    result = probe.run(call.argv)
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - start < TTL_SECONDS  # not by the time to live: its holder is known to be dead
    assert " waiting " not in result.stderr
    trace = probe.trace()
    assert set(trace) == {f"hello {step}" for step in range(4)}
    assert trace.count("hello 0") == 1
    assert len(trace) <= 5
    assert store.keys("_work") == []


def test_sigterm_gives_the_lease_back(store: Store, probe: Probe):
    call = probe.invocation(store, steps=50, seconds=0.2)
    process = probe.start(call.argv)
    wait_for(lambda: probe.trace())
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 75
    assert "Traceback" not in errors
    assert store.read(f"_work/probe/{call.digest}/_lease.json") is None
    assert list((Path(os.environ["QDFLASH_HOME"]) / "tmp").iterdir()) == []


def test_two_live_writers_of_one_digest_the_second_waits_and_adopts(store: Store, probe: Probe):
    call = probe.invocation(store, steps=4, hold=True)
    first = probe.start(call.argv)
    wait_for(lambda: len(probe.trace()) == 4)
    second = probe.start(call.argv)
    assert second.stderr is not None
    said = second.stderr.readline()
    assert " waiting " in said
    assert f"pid={first.pid}" in said
    Path(f"{probe.trace_path}.go").touch()
    first.communicate()
    _, errors = second.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert " adopted " in errors
    assert probe.trace() == [f"hello {step}" for step in range(4)]


WRITER = """
import sys, time
from pathlib import Path
from components.store.artifact import commit
from components.store.backend import Store
from components.store.lease import TTL_SECONDS
url, folder, start = sys.argv[1:]
store = Store(url)
time.sleep(max(0, float(start) - time.time()))
artifact, won = commit(store, "probe", "d" * 64, Path(folder), {"metrics": {}})
print(won, artifact.manifest["attempt"])
"""


@pytest.mark.slow
def test_two_processes_commit_one_digest_one_manifest_wins_and_no_attempt_is_left(
    store: Store, tmp_path: Path, probe: Probe
):
    start = str(time.time() + 2.5)
    writers = []
    for number in range(2):
        folder = tmp_path / f"out{number}"
        folder.mkdir()
        (folder / "file").write_text(f"writer {number}")
        writers.append(
            subprocess.Popen(
                [sys.executable, "-c", WRITER, store.url, str(folder), start], stdout=subprocess.PIPE, text=True
            )
        )
    answers = [writer.communicate(timeout=60)[0].split() for writer in writers]
    assert sorted(won for won, _ in answers) == ["False", "True"]
    assert answers[0][1] == answers[1][1]
    artifact = read_manifest(store, "probe", "d" * 64)
    assert artifact is not None
    winner = [won for won, _ in answers].index("True")
    assert store.read(artifact.key("file")) == f"writer {winner}".encode()
    assert sorted(store.keys("probe")) == sorted([artifact.key("file"), f"probe/{'d' * 64}/_manifest.json"])


@pytest.mark.slow
def test_kill_9_in_the_middle_of_an_upload_leaves_nothing_visible(store: Store, probe: Probe):
    call = probe.invocation(store, steps=0, size=400 << 20)
    process = probe.start(call.argv)
    tmp = Path(os.environ["QDFLASH_HOME"]) / "tmp"
    wait_for(lambda: [path for path in tmp.rglob("big.bin") if path.stat().st_size == 400 << 20])
    time.sleep(0.15)
    process.kill()
    process.communicate()
    assert read_manifest(store, "probe", call.digest) is None
    assert all(not key.endswith("_manifest.json") for key in store.keys("probe"))
    assert all(store.size(key) == 400 << 20 for key in store.keys("probe") if key.endswith("big.bin"))
    assert probe.run(call.argv).returncode == 0
    assert verify(committed(store, call.digest), tmp) == []


def test_what_a_killed_upload_of_work_left_goes_when_the_next_run_begins(store: Store, probe: Probe):
    call = probe.invocation(store, fail="TransientError")
    store.write(f"_work/probe/{call.digest}/folders/state/of-a-dead-process/file", b"half")
    assert probe.run(call.argv).returncode == 75
    assert store.keys(f"_work/probe/{call.digest}/folders") == []


@pytest.mark.slow
def test_wrong_credentials_and_a_dead_store(s3: dict[str, str], probe: Probe, monkeypatch: pytest.MonkeyPatch):
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    call = probe.invocation(Store("s3://qdflash/x"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    result = probe.run(call.argv)
    assert result.returncode == 2
    assert "s3://qdflash/x" in one_line_error(result)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    start = time.monotonic()
    result = probe.run(call.argv)
    assert result.returncode == 75
    assert "http://127.0.0.1:9" in one_line_error(result)
    assert time.monotonic() - start < 30


def test_config_from_a_file(probe: Probe, tmp_path: Path):
    call = probe.invocation(Store(str(tmp_path / "store")), text="filed")
    at = call.argv.index("--config") + 1
    (tmp_path / "config.json").write_text(call.argv[at])
    assert probe.run((*call.argv[:at], str(tmp_path / "config.json"), *call.argv[at + 1 :])).returncode == 0


def test_a_stage_by_hand_names_its_own_digest_and_takes_short_ones(probe: Probe, tmp_path: Path):
    store = Store(str(tmp_path / "store"))
    first = probe.invocation(store)
    second = probe.invocation(store, {"before": [first.uri]}, text="b")
    assert probe.run((*first.argv[: first.argv.index("--output")], "--output", store.uri("probe/"))).returncode == 0
    short = [argument.replace(first.digest, first.digest[:6]) for argument in second.argv]
    result = probe.run((*short[: short.index("--output")], "--output", store.uri("probe/")))
    assert result.returncode == 0, result.stderr
    assert second.uri in result.stderr
    assert committed(store, second.digest).manifest["inputs"] == {"before": [first.uri]}


def test_a_digest_cut_too_short_is_named(tmp_path: Path):
    store = Store(str(tmp_path / "store"))
    for digest in ("ab" * 32, "ac" * 32):
        store.write(f"pack/{digest}/_manifest.json", MANIFEST)
    with pytest.raises(UserError, match=r"pack/a: 2 artifacts begin so; give more digits"):
        bind(load("gptq"), [f"target={store.uri('pack/a')}"])
    with pytest.raises(UserError, match=r"pack/ff: no such file or artifact"):
        bind(load("gptq"), [f"target={store.uri('pack/ff')}"])


@pytest.mark.parametrize("stage", STAGES)
def test_the_help_shows_how_a_stage_is_run_by_hand(stage: str):
    text = parser(stage, load(stage)).format_help()
    assert f"--output $QDFLASH_STORE/{stage}/" in text
    assert 'eval "$(qdflash store env --secret)"' in text


def test_a_number_that_canonical_json_cannot_hold(probe: Probe, tmp_path: Path):
    with pytest.raises(UserError, match="numbers must be finite"):
        probe.invocation(Store(str(tmp_path)), number=float("inf"))


def test_an_error_after_another_process_took_over_is_no_bug(probe: Probe, tmp_path: Path):
    store = Store(str(tmp_path / "store"))
    call = probe.invocation(store, steps=1, hold=True, fail="Bug")
    process = probe.start(call.argv)
    wait_for(probe.trace)
    store.write(f"_work/probe/{call.digest}/_lease.json", b'{"owner": "another"}')
    Path(f"{probe.trace_path}.go").touch()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "another process took over" in errors.splitlines()[-1]


def test_scratch_that_is_locked_stays_whatever_its_pid_says(probe: Probe, tmp_path: Path):
    tmp = Path(os.environ["QDFLASH_HOME"]) / "tmp"
    for name in ("probe-4999999-abcdefgh", "probe-4999998-abcdefgh", "my-own-folder12"):
        (tmp / name).mkdir(parents=True)
    for name in ("probe-4999999-abcdefgh", "probe-4999998-abcdefgh"):
        (tmp / name / ".lock").touch()
    with (tmp / "probe-4999999-abcdefgh" / ".lock").open() as held:  # its process lives in another pid namespace
        fcntl.flock(held, fcntl.LOCK_EX)
        assert probe.run(probe.invocation(Store(str(tmp_path / "store"))).argv).returncode == 0
    assert {path.name for path in tmp.iterdir()} == {"probe-4999999-abcdefgh", "my-own-folder12"}


def test_a_metric_that_is_no_number_is_named_before_anything_is_uploaded(probe: Probe, tmp_path: Path):
    store = Store(str(tmp_path / "store"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("x")
    with pytest.raises(UserError, match=r"metrics\.loss\.1 is not a finite number"):
        commit(store, "probe", "d" * 64, tmp_path / "out", {"metrics": {"loss": [1.0, float("nan")]}})
    assert store.keys("probe") == []


def test_a_store_may_lie_below_a_folder_that_is_called_files(probe: Probe, tmp_path: Path):
    store = Store(str(tmp_path / "_files" / "store"))
    digests = set()
    for text in ("one", "two"):
        first = probe.invocation(store, text=text)
        assert probe.run(first.argv).returncode == 0
        digests.add(probe.invocation(store, {"before": [first.uri]}).digest)
    assert len(digests) == 2


@pytest.mark.slow
def test_another_rank_of_torchrun_takes_part_and_commits_nothing(
    probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It ends by itself once rank 0 has committed, or found that committed: it may be waiting for rank 0 to begin."""
    store = Store(str(tmp_path / "store"))
    call = probe.invocation(store, hold=True, steps=1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "1")
    rank = probe.start(call.argv)
    wait_for(probe.trace)
    assert store.keys("_work/probe") == [f"_work/probe/{call.digest}/parts/0"]
    assert store.keys("probe") == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "text.txt").touch()
    commit(store, "probe", call.digest, tmp_path / "out", {"metrics": {}})
    _, said = rank.communicate(timeout=60)
    assert (rank.returncode, said) == (0, said.splitlines()[0] + "\n"), said  # its progress, and nothing else
    assert probe.run(call.argv).returncode == 0


@pytest.mark.parametrize(("error", "codes"), [("UserError", "2\n"), ("", "")])
def test_a_process_that_fails_adds_its_code_where_it_is_told(
    error: str, codes: str, probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("QDFLASH_EXIT_CODES", str(tmp_path / "codes"))
    (tmp_path / "codes").touch()
    probe.run(probe.invocation(Store(str(tmp_path / "store")), fail=error, steps=0).argv)
    assert (tmp_path / "codes").read_text() == codes
