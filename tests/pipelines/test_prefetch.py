"""``qdflash bench prefetch`` over real HTTP, from a hub on loopback that holds files in the data sets' own layouts."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from components.chats.rows import read_rows
from components.contract.errors import TransientError
from components.measure import published
from components.measure.quality import SUITES, select_rows
from pipelines.prefetch import SOURCES, fetch
from tests.components.prompts import hub

CARD = """---
configs:
- config_name: {}
  data_files:
  - split: test
    path: {}
---
"""
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
    folders = {suite: tmp_path / "hub" / suite for suite in (*SUITES, "gsm8k", "openai_humaneval", "LongBench-v2")}
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
    for name, subset, column in (("gsm8k", "main", "question"), ("openai_humaneval", "openai_humaneval", "prompt")):
        (folders[name] / subset).mkdir(parents=True)
        table = pa.Table.from_pylist([{column: f"{{{number}}}?", "answer": "1"} for number in range(70)])
        parquet.write_table(table, folders[name] / subset / "test-00000-of-00001.parquet")
        (folders[name] / "README.md").write_text(CARD.format(subset, f"{subset}/test-*"))
    folders["LongBench-v2"].mkdir()
    documents = [{"_id": str(number), "question": "Why?", "context": f"text {number}"} for number in range(70)]
    (folders["LongBench-v2"] / "data.json").write_text(json.dumps(documents))
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
    every = {suite: source for suite in SUITES for source in SOURCES[suite]}
    every |= {source.id.split("/")[1]: source for source in SOURCES["acceptance"]}
    served = [(source.id, source.revision, repositories[name]) for name, source in every.items()]
    with hub.serve(*served) as (url, _):
        done = prefetch(data, url, hub.TOKEN)
        refused = prefetch(tmp_path / "other", url, None, "--suite", "gpqa")
    assert done.returncode == 0, done.stderr
    files = {path.name: path for path in data.glob("*.jsonl")}
    for suite, count in (("mmlu_pro", 3), ("ifeval", 2), ("gpqa", 2)):
        rows = select_rows(suite, files, None, SUITES[suite].shots)
        assert len(rows[SUITES[suite].split]) == count
        for name in every[suite].splits.values():
            assert f"{files[name]}: " in done.stdout
    prompts = published.rows(data / "acceptance", lambda text, add_special_tokens: {"input_ids": [*text.encode()]})
    assert Counter(row["category"] for row in prompts) == {"gsm8k": 64, "humaneval": 64, "longbench_v2": 64}
    assert prompts[3]["conversations"][0]["content"].startswith("{3}?\nPlease reason step by step")
    assert prompts[3]["conversations"][0]["content"].endswith("\\boxed{}.")
    assert [row["_id"] for row in read_rows(data / "acceptance" / "longbench_v2.jsonl")] == list(map(str, range(64)))
    record = json.loads((data / "sources.json").read_text())
    assert {entry["revision"] for entry in record.values()} == {source.revision for source in every.values()}

    # this process may not go online
    assert list(fetch(["gpqa"], data)) == [(files["gpqa.jsonl"], 2)]
    files["gpqa.jsonl"].write_text("torn")
    with pytest.raises(TransientError, match="the hub does not answer"):
        list(fetch(["gpqa"], data))

    # gated: whose terms, and where
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert f"accept Idavidrein's terms at {url}/datasets/Idavidrein/gpqa and set HF_TOKEN" in refused.stderr
