"""``qdflash bench prefetch`` over real HTTP, from a hub on loopback that holds files in the data sets' own layouts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from components.contract.errors import TransientError
from components.measure.quality import SUITES, select_rows
from pipelines.prefetch import SOURCES, fetch
from tests.components.prompts import hub

GPQA_CARD = """---
configs:
- config_name: gpqa_main
  data_files: gpqa_main.csv
- config_name: gpqa_diamond
  data_files: gpqa_diamond.csv
---
"""


def mmlu(subject: str, number: int) -> dict:
    return {
        "question_id": number,
        "question": f"{subject} {number}?",
        "options": ["one", "two"],
        "answer": "A",
        "answer_index": 0,
        "cot_content": "A: Let's think step by step. The answer is (A).",
        "category": subject,
        "src": "test",
    }


@pytest.fixture
def repositories(tmp_path: Path) -> dict[str, Path]:
    """Folders as the three repositories hold their files."""
    folders = {suite: tmp_path / "hub" / suite for suite in SOURCES}
    (folders["mmlu_pro"] / "data").mkdir(parents=True)
    for split, count in (("test", 3), ("validation", 5)):
        table = pa.Table.from_pylist([mmlu("math", number) for number in range(count)])
        parquet.write_table(table, folders["mmlu_pro"] / "data" / f"{split}-00000-of-00001.parquet")
    folders["ifeval"].mkdir()
    items = [
        {"key": 1000, "prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        {
            "key": 1001,
            "prompt": "Write 5 words.",
            "instruction_id_list": ["length_constraints:number_words"],
            "kwargs": [{"relation": "at least", "num_words": 5}],
        },
    ]
    (folders["ifeval"] / "ifeval_input_data.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    folders["gpqa"].mkdir()
    (folders["gpqa"] / "README.md").write_text(GPQA_CARD)
    header = "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3,Record ID"
    for name, count in (("gpqa_main", 3), ("gpqa_diamond", 2)):
        lines = [header, *(f'"Which, {number}?",right,a,b,c,rec{number}' for number in range(count))]
        (folders["gpqa"] / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folders


def prefetch(data: Path, url: str, token: str | None, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    environment |= {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(data.parent / "hf")}
    environment |= {"HF_TOKEN": token} if token else {}
    argv = [sys.executable, "-m", "pipelines.cli", "bench", "prefetch", "--data", str(data), *words]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_items_are_stored_once_in_the_form_that_the_suites_read(repositories: dict[str, Path], tmp_path: Path):
    data = tmp_path / "data"
    served = [(source.id, source.revision, repositories[suite]) for suite, source in SOURCES.items()]
    with hub.serve(*served) as (url, _):
        done = prefetch(data, url, hub.TOKEN)
        refused = prefetch(tmp_path / "other", url, None, "--suite", "gpqa")
    assert done.returncode == 0, done.stderr
    files = {path.name: path for path in data.glob("*.jsonl")}
    for suite, count in (("mmlu_pro", 3), ("ifeval", 2), ("gpqa", 2)):
        rows = select_rows(suite, files, None, SUITES[suite].shots)
        assert len(rows[SUITES[suite].split]) == count
        for name in SOURCES[suite].splits.values():
            assert f"{files[name]}: " in done.stdout
    record = json.loads((data / "sources.json").read_text())
    assert {entry["revision"] for entry in record.values()} == {source.revision for source in SOURCES.values()}

    # this process may not go online
    assert list(fetch(["gpqa"], data)) == [(files["gpqa.jsonl"], 2)]
    files["gpqa.jsonl"].write_text("torn")
    with pytest.raises(TransientError, match="the hub does not answer"):
        list(fetch(["gpqa"], data))

    # gated: whose terms, and where
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert f"accept Idavidrein's terms at {url}/datasets/Idavidrein/gpqa and set HF_TOKEN" in refused.stderr
