"""kill -9 at every kind of commit point: the draw afterwards is, byte for byte, the one that nothing disturbed."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.components.prompts import hub, nemotron
from tests.components.prompts.conftest import Stage
from tests.components.prompts.nemotron import REPOSITORY, REVISION

SMALL = """
import components.prompts.draw as draw, components.prompts.read as read
draw.STEP, read.PART_ROWS = 100, 70
"""
PAUSE = """
import time
from components.store.work import Work
put = Work.put
def pause(self, name, data):
    put(self, name, data)
    if name == {part!r}:
        time.sleep(60)
Work.put = pause
"""
KEEP = "from components.store.work import Work; Work.clear = lambda self: None"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("files", "read/00000-00000"),
        ("files", "read/00000-00006"),
        ("files", "read/00001-00004"),
        ("hub", "read/00000-00002"),
        ("files", "lengths/00002-00003"),
    ],
)
def test_a_killed_draw_goes_on_where_it_was(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, part: str
) -> None:
    """The first shard has 420 rows, six parts of 70 and an empty one that ends it."""
    rows = [nemotron.row(f"Question {number} of a few words?", "stem") for number in range(700)]
    files = [str(path) for path in nemotron.write(tmp_path / "repository", "stem", [rows[:420], rows[420:]])]
    nemotron.card(tmp_path / "repository", ["stem"])
    config: dict = {"count": 400, "max_prompt_tokens": 121}
    undisturbed = Stage(tmp_path / "undisturbed", stage.model).run({"files": files}, config)
    with hub.serve((REPOSITORY, REVISION, tmp_path / "repository")) as (url, _):
        inputs = {"files": files}
        if source == "hub":
            inputs, config = {}, {**config, "dataset": {"id": REPOSITORY, "revision": REVISION, "splits": ["stem"]}}
            online = {"HF_ENDPOINT": url, "HF_TOKEN": hub.TOKEN, "HF_HUB_OFFLINE": "0", "HF_HOME": f"{tmp_path}/hf"}
            for name, value in online.items():
                monkeypatch.setenv(name, value)
        process = stage.start(config, inputs, SMALL + PAUSE.format(part=part))
        work = stage.folder / "store" / "_work" / "prompts"
        deadline = time.monotonic() + 60
        while not list(work.glob(f"*/parts/{part}")):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert stage.committed(config, inputs) is None
        kept = {path: os.stat(path).st_mtime_ns for path in work.glob("*/parts/*/*")}
        again = stage.start(config, inputs, f"{SMALL}\n{KEEP}")
        _, said = again.communicate(timeout=60)
    assert again.returncode == 0, said
    assert {path: os.stat(path).st_mtime_ns for path in kept} == kept, "committed parts were made again"
    assert len(list(work.glob("*/parts/read/*"))) == 7 + 5
    assert stage.artifact(inputs, config).files == undisturbed.files
