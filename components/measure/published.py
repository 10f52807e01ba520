"""The published acceptance protocol: GSM8K, HumanEval and LongBench-v2, 64 prompts each, 256 new tokens, no thinking.

(arXiv 2607.04244, on the DFlash authors' benchmark.) Files hold the data sets' own rows. GSM8K's and HumanEval's
questions are put in that benchmark's words; LongBench-v2's follow the first 8,192 tokens of their document, in no
published words. The published figure is the mean of the three data sets'.
"""

from pathlib import Path
from typing import Any

from components.chats.rows import Row, read_rows
from components.contract.errors import UserError
from components.measure.texts import first_tokens

PROMPTS, MAX_TOKENS, DOCUMENT_TOKENS = 64, 256, 8192
QUESTIONS = {
    "gsm8k": "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    "humaneval": "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{prompt}\n```",
    "longbench_v2": "{context}\n\n{question}",
}


def rows(folder: Path, tokenizer: Any) -> list[Row]:
    """Return the first ``PROMPTS`` rows of every ``<data set>.jsonl`` as ``{id, category, conversations}``.

    Raises :class:`UserError` for a row without one of its data set's fields.
    """
    found = []
    for name, question in QUESTIONS.items():
        for number, row in enumerate(list(read_rows(folder / f"{name}.jsonl"))[:PROMPTS]):
            if "context" in row:
                row = {**row, "context": _beginning(str(row["context"]), tokenizer)}
            try:
                text = question.format(**row)
            except KeyError as error:
                raise UserError(
                    f"{folder / name}.jsonl:{number + 1} has no field {error}; see the data set's own schema"
                ) from error
            conversation = [{"role": "user", "content": text}]
            found.append({"id": f"{name}-{number}", "category": name, "conversations": conversation})
    return found


def _beginning(text: str, tokenizer: Any) -> str:
    ids = first_tokens(tokenizer, text, DOCUMENT_TOKENS)
    return text if len(ids) < DOCUMENT_TOKENS else str(tokenizer.decode(ids))
