"""``qdflash compare`` on the reports of two runs that differ in one knob."""

import subprocess
import sys
from pathlib import Path

import pytest

from components.contract.errors import UserError
from components.store.artifact import commit
from components.store.backend import Store
from pipelines.cli import recipe_at
from pipelines.compare import run_of


def put(store: Store, folder: Path, stage: str, letter: str, config: dict, inputs: dict | None = None) -> str:
    folder.mkdir(parents=True)
    (folder / "index.html").write_text("a page")
    manifest = {"version": 1, "config": config, "inputs": inputs or {}, "salt": None, "metrics": {}, "phases": {}}
    manifest |= {"started": 0.0, "seconds": 1.5, "versions": {"python": "3.11"}}
    return commit(store, stage, letter * 64, folder, manifest)[0].uri


@pytest.fixture
def store(tmp_path: Path, home: Path) -> Store:
    made = Store(str(tmp_path / "store"))
    for letter, damping in (("a", 0.01), ("b", 0.05)):
        drafter = put(made, tmp_path / letter / "gptq", "gptq", letter, {"damping": damping, "group_size": 64})
        put(made, tmp_path / letter / "report", "report", letter, {"names": ["gptq"]}, {"stages": [drafter]})
    return made


def compare(store: Store, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pipelines.cli", "compare", *words, "--store", store.url]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_the_page_of_two_runs(store: Store, tmp_path: Path):
    page = tmp_path / "new" / "page.html"
    done = compare(store, "report/aaaa", "report/bbbb", "-o", str(page))
    assert (done.returncode, done.stdout) == (0, f"{page}\n"), done.stderr
    text = page.read_text()
    assert "<th>report/aaaa</th><th>report/bbbb</th>" in text
    assert "<code>gptq.damping</code></th><td>0.01</td><td>0.05</td>" in text
    assert "group_size" not in text


def test_what_is_no_run_is_refused(store: Store):
    done = compare(store, "report/aaaa", "report/aaaa")
    assert done.returncode == 2
    assert done.stderr == "qdflash: compare: report/aaaa twice; name two runs (qdflash artifacts list report)\n"
    with pytest.raises(UserError, match="gptq/bbbb: a gptq, no report"):
        run_of(store, "gptq/bbbb", None)
    with pytest.raises(UserError, match=r"smol: teacher, .*, gate not made yet; qdflash run smol"):
        run_of(store, "smol", recipe_at("smol"))
