"""Data sets of a hub, through the real client over real HTTP: what is refused, and that each file comes once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from components.contract.errors import UserError
from components.contract.log import Log
from components.prompts.hub import Hub, _Copy, _key, of_hub
from components.prompts.stage import Dataset
from components.store.backend import Store
from tests.components.prompts import hub, nemotron
from tests.components.prompts.conftest import SPLITS, Stage, read
from tests.components.prompts.nemotron import REPOSITORY, REVISION

pytestmark = pytest.mark.slow
COPIES = f"_datasets/{REPOSITORY}/{REVISION}/data"
DRAWS = [
    {"count": 20, "dataset": {"splits": ["chat"]}},
    {"count": 60},
    {"count": 60, "quotas": {"stem": 10, "chat": 40, "multilingual_de": 10}},
]


def dataset(**fields: object) -> dict:
    return {"dataset": {"id": REPOSITORY, "revision": REVISION, "splits": SPLITS, **fields}}


def online(url: str, folder: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": url, "HF_TOKEN": hub.TOKEN, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "hf")}


def sent(asked: list[str]) -> Counter[str]:
    """Count how often each parquet file was asked for."""
    return Counter(one.rpartition("/")[2] for one in asked if one.startswith("GET ") and one.endswith(".parquet"))


def test_draws_share_what_comes_from_the_hub_once_and_give_the_bytes_of_local_shards(
    repository: Path, stage: Stage
) -> None:
    shards = sorted((repository / "data").iterdir())
    once = {path.name: 1 for path in shards}
    drawn = []
    with hub.serve((REPOSITORY, REVISION, repository)) as (url, asked):
        for number, fields in enumerate(DRAWS):
            config = {**fields, **dataset(**fields.get("dataset", {}))}
            if number == 2:
                damage(stage.store, f"{COPIES}/{shards[0].name}")
            environment = online(url, stage.folder / str(number)) | {"QDFLASH_HOME": f"{stage.folder}/{number}"}
            code, line = stage.ends({}, config, **environment)
            assert code == 0, line
            drawn.append(stage.artifact({}, config))
            assert sent(asked) == (once | {shards[0].name: 2} if number == 2 else once if number else chat_of(once))
        assert all(REVISION in one for one in asked if REPOSITORY in one)
    for fields, artifact in zip(DRAWS, drawn, strict=True):
        files = [str(path) for path in shards if not fields.get("dataset") or path.name.startswith("chat")]
        local = stage.run({"files": files}, {name: value for name, value in fields.items() if name != "dataset"})
        assert local.files == artifact.files
    rows = read(drawn[2])
    assert Counter(row["category"] for row in rows) == DRAWS[2]["quotas"]
    assert rows[0]["conversations"][0] == {"role": "system", "content": "You are a helpful assistant."}
    assert [turn["role"] for turn in rows[0]["conversations"]] == ["system", "user"]
    assert drawn[2].metrics["dropped"] == {"duplicate": 3}
    assert not list(stage.folder.rglob("hf/**/*.parquet"))


def chat_of(once: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in once.items() if name.startswith("chat")}


def damage(store: Store, copy: str) -> None:
    data = store.read(f"{copy}/bytes") or b""
    store.write(f"{copy}/bytes", data[:-100] + b"\xff" + data[-99:])


def test_draws_at_once_share_a_copy_and_one_that_is_killed_in_a_shard_leaves_none(
    repository: Path, stage: Stage
) -> None:
    """Of two draws, the one that copies the first shard is killed in the middle of it, and started again later."""
    configs = [{"count": count, **dataset(splits=["stem", "chat"])} for count in (20, 30)]
    files = [str(path) for path in sorted((repository / "data").iterdir()) if "multilingual" not in path.name]
    pause = Event()
    with hub.serve((REPOSITORY, REVISION, repository), pause=pause) as (url, asked):

        def start(number: int) -> subprocess.Popen[str]:
            environment = online(url, stage.folder / str(number)) | {"QDFLASH_HOME": f"{stage.folder}/{number}"}
            return stage.start(configs[number], {}, **environment)

        draws = [start(number) for number in range(2)]
        wait_for(lambda: sent(asked))
        (lease,) = stage.store.keys(COPIES)
        holder = json.loads(stage.store.read(lease) or b"")["pid"]
        number = [draw.pid for draw in draws].index(holder)
        draws[number].send_signal(signal.SIGKILL)
        draws[number].communicate()
        wait_for(lambda: sent(asked).total() == 2)
        assert stage.store.keys(COPIES) == [lease]
        draws[number] = start(number)
        pause.set()
        for draw in draws:
            _, said = draw.communicate(timeout=120)
            assert draw.returncode == 0, said
    assert sorted(sent(asked).values()) == [1, 1, 1, 2]
    assert {key.rpartition("/")[2] for key in stage.store.keys(COPIES)} == {"bytes", "index.json"}
    for config in configs:
        assert stage.run({"files": files}, {"count": config["count"]}).files == stage.artifact({}, config).files


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_full_disk_is_not_the_hub_s(tmp_path: Path, stage: Stage) -> None:
    rows = [nemotron.row(f"Question {n}?", "stem", answer=os.urandom(4096).hex()) for n in range(400)]
    nemotron.write(tmp_path / "repository", "stem", [rows])
    nemotron.card(tmp_path / "repository", ["stem"])
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)
    try:
        with hub.serve((REPOSITORY, REVISION, tmp_path / "repository")) as (url, _):
            environment = online(url, tmp_path) | {"QDFLASH_HOME": str(small)}
            code, line = stage.ends({}, {"count": 1, **dataset(splits=["stem"])}, **environment)
    finally:
        subprocess.run(["umount", small], check=True)
    assert (code, "disk full" in line) == (2, True), line
    assert stage.store.keys("_datasets") == []


def test_a_file_that_no_revision_pins_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing pins it"):
        _key(Dataset(id=REPOSITORY, revision=REVISION), "https://example.org/rows.parquet")
    with pytest.raises(ValueError, match=r"rows\.csv\.gz: parquet and JSON lines are read"):
        _key(Dataset(id=REPOSITORY, revision=REVISION), f"https://hub/x@{REVISION}/rows.csv.gz")


def test_a_folder_of_the_data_set_s_name_is_not_read_in_its_place(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="pattern"):
        Dataset(id="../..", revision=REVISION)
    (tmp_path / REPOSITORY).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="a folder of this name is here"):
        of_hub(Dataset(id=REPOSITORY, revision=REVISION), stage.store, tmp_path, Log("prompts"))


def test_a_copy_that_is_removed_while_it_is_looked_at_is_none(stage: Stage, tmp_path: Path) -> None:
    copy = _Copy("hf://x", "_datasets/x", Hub(Dataset(id=REPOSITORY, revision=REVISION)), stage.store, Log("prompts"))
    stage.store.write("_datasets/x/bytes", b"12")
    stage.store.write("_datasets/x/index.json", json.dumps({"size": 2, "sha256": "0" * 64}).encode())

    def gone(key: str, path: Path) -> None:
        raise FileNotFoundError(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "download", lambda _self, key, path: gone(key, path))
        assert not copy._stored(tmp_path / "copy")


REFUSED: list[tuple[dict, str, str]] = [
    ({}, "", "gated, and an account with access is needed (HF_TOKEN is not set); accept nvidia's terms at http"),
    ({}, "hf_someone", f"(the one in HF_TOKEN has none); accept nvidia's terms at URL/datasets/{REPOSITORY} and"),
    ({"revision": "0" * 40}, hub.TOKEN, "dataset.id nvidia/Nemotron-Post-Training-Dataset-v2 at 000000000000: no"),
    ({"id": "nvidia/Nothing"}, hub.TOKEN, "dataset.id nvidia/Nothing at 5c89e01dd720: no such data set"),
    ({"splits": ["science"]}, hub.TOKEN, "no split science; it has stem, chat, multilingual_de"),
]
ONE_BY_ONE = """
import json, os, sys
from components.contract.cli import main
for os.environ["HF_TOKEN"], argv in json.loads(sys.argv[1]):
    print(main("prompts", argv))
"""


def test_what_the_hub_refuses_is_said_with_what_to_do(repository: Path, stage: Stage) -> None:
    draws = [(token, stage.argv({"count": 1, **dataset(**fields)}, {})) for fields, token, _ in REFUSED]
    with hub.serve((REPOSITORY, REVISION, repository)) as (url, _):
        command = [sys.executable, "-c", ONE_BY_ONE, json.dumps(draws)]
        environment = {**os.environ, **online(url, stage.folder)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["2"] * len(REFUSED), done.stderr
    lines = [line.replace('\\"', '"') for line in done.stderr.splitlines() if " prompts failed " in line]
    for (_, _, said), line in zip(REFUSED, lines, strict=True):
        assert said.replace("URL", url) in line


def test_a_hub_that_does_not_answer_is_transient(stage: Stage) -> None:
    at_once = "import time; time.sleep = lambda seconds: None"  # else the client waits for 23 s between its tries
    draw = stage.start({"count": 1, **dataset()}, {}, at_once, **online("http://127.0.0.1:9", stage.folder))
    _, said = draw.communicate(timeout=120)
    assert draw.returncode == 75, said
    assert "the hub does not answer" in said.splitlines()[-1]
