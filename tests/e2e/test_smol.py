"""The demo's first stages on the demo's model: its package, its prompts, its answers."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.e2e.command import qdflash

pytestmark = pytest.mark.slow

STAGES = ("teacher", "prompts_eval", "prompts_a", "regen_a")
SMALLER = ("prompts_eval.count=4", "prompts_a.count=8", "regen.max_tokens=24", "regen.parallel=8")
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def test_smollm2_answers_the_demo_s_prompts(own_home: dict[str, str], tmp_path: Path) -> None:
    chosen = [word for stage in STAGES for word in ("--only", stage)]
    chosen += [word for knob in SMALLER for word in ("--set", knob)]
    qdflash(own_home, "run", "smol", *chosen)
    planned = json.loads(qdflash(own_home, "plan", "smol", "--json", *chosen).stdout)["tasks"]
    made = {task["name"]: f"{task['stage']}/{task['digest']}" for task in planned}
    for task in ("teacher", "regen_a"):
        qdflash(own_home, "artifacts", "export", made[task], str(tmp_path / task))
    tokenizer = Tokenizer.from_file(str(tmp_path / "teacher/tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    rows = [
        json.loads(line) for path in sorted((tmp_path / "regen_a").glob("part-*.jsonl")) for line in path.open("rb")
    ]
    assert len({row["id"] for row in rows}) == len(rows) == 8
    for row in rows:
        asked = tokenizer.decode(row["prompt_token_ids"], skip_special_tokens=False)
        assert asked.endswith(TURN.format(row["conversations"][-1]["content"]))
        stopped = row["token_ids"][-1] == end
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(row["token_ids"]) == 24
        assert row["text"] == tokenizer.decode(row["token_ids"]).rstrip("\ufffd")
        assert row["model"] == made["teacher"].partition("/")[2]
    assert len({row["text"] for row in rows}) == 8
