"""Study ``sequences-throughput``: rows that come as text become token ids, beside the tokenizer's own encode_batch.

``.venv/train/bin/python tests/benchmarks/sequences_throughput.py --model FOLDER``, FOLDER with SmolLM2's tokenizer;
writes docs/results/sequences-throughput.*. Both take turns on the same chats. Ours reads JSON lines, renders them with
the chat template and ends with each row's token ids in Python; bare is one ``encode_batch`` call on all texts, which
were rendered before. Peak memory is that of a process of its own, at one and at ten times the rows.
"""

import argparse
import itertools
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import study

from components.chats.rows import Row, read_rows, write_rows
from components.chats.template import Template, render_answered
from components.checkpoint.load import load_tokenizer
from components.sequences.encode import with_token_ids

ROWS, ROUNDS = 20_000, 6
T_QUANTILE = 2.571  # of 6 rounds, 95 %


def main() -> int:
    """Measure and write the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--peak", type=Path, help="read this folder once and print the peak memory in MiB")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.model)
    if arguments.peak:
        count_tokens(arguments.peak, tokenizer)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        once, tenfold = Path(folder, "once"), Path(folder, "tenfold")
        for place, count in ((once, ROWS), (tenfold, 10 * ROWS)):
            place.mkdir()
            write_rows(place / "part-00000.jsonl", chats(count))
        ratios, rates = alternate(once, tokenizer)
        peaks = [peak(place, arguments.model) for place in (once, tenfold)]
    mean, half = statistics.mean(ratios), T_QUANTILE * statistics.stdev(ratios) / math.sqrt(len(ratios))
    load = f"{ROWS} chats, {rates['tokens'] / ROWS:.0f} tokens each on average"

    def row(metric: str, value: float, unit: str, n: int, note: str, **bounds: float) -> dict[str, Any]:
        return study.row("cpu-smollm2", metric, value, unit, n, note=note, **bounds)

    study.write(
        "sequences-throughput",
        ".venv/train/bin/python tests/benchmarks/sequences_throughput.py --model FOLDER",
        {name: version(name) for name in ("tokenizers", "transformers")},
        [
            row("ratio_to_encode_batch", mean, "ratio", ROUNDS, load, low=mean - half, high=mean + half),
            row("tokens_per_second", rates["ours"], "tokens/s", ROUNDS, "reading, rendering and encoding, median"),
            row("encode_batch_tokens_per_second", rates["bare"], "tokens/s", ROUNDS, "median"),
            row("peak_memory", peaks[0], "MiB", 1, f"resident set of a process, {ROWS} rows"),
            row("peak_memory_tenfold", peaks[1], "MiB", 1, f"the same, {10 * ROWS} rows"),
        ],
    )
    print(json.dumps({"ratios": ratios, "rates": rates, "peaks": peaks}))
    return 0


def alternate(folder: Path, tokenizer: Any) -> tuple[list[float], dict[str, float]]:
    """Return each round's ratio of speeds, after a warm-up, and tokens, median tokens a second of ours and bare."""
    conversations = [row["conversations"] for row in read_rows(folder)]
    texts = [prompt + answer for prompt, answer in render_answered(tokenizer, conversations, Template())]
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    tokens = 0
    for number in range(ROUNDS + 1):
        for who in ("ours", "bare") if number % 2 else ("bare", "ours"):
            started = time.perf_counter()
            if who == "ours":
                tokens = count_tokens(folder, tokenizer)
            else:
                tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
            if number:
                seconds[who].append(time.perf_counter() - started)
                print(number, who, f"{tokens / seconds[who][-1]:.0f} tokens/s", flush=True)
    ratios = [bare / ours for ours, bare in zip(seconds["ours"], seconds["bare"], strict=True)]
    return ratios, {"tokens": tokens, **{who: tokens / statistics.median(found) for who, found in seconds.items()}}


def count_tokens(folder: Path, tokenizer: Any) -> int:
    """Encode every row of a folder; return the number of token ids."""
    rows = with_token_ids(read_rows(folder), tokenizer, Template())
    return sum(len(row["prompt_token_ids"]) + len(row["token_ids"]) for row in rows)


def peak(folder: Path, model: Path) -> float:
    """Return the largest resident set, in MiB, of a process that loads the tokenizer and encodes ``folder``."""
    argv = [sys.executable, __file__, "--model", str(model), "--peak", str(folder)]
    return float(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()[-1])


def chats(count: int) -> Iterator[Row]:
    """Make answered chats of English text: a prompt of the demo, answered by some twenty others."""
    path = study.ROOT / "pipelines" / "recipes" / "smol" / "prompts.jsonl"
    texts = [json.loads(line)["conversations"][-1]["content"] for line in path.read_text().splitlines()]
    for number in range(count):
        answer = " ".join(itertools.islice(itertools.cycle(texts), number % len(texts), number % len(texts) + 24))
        turns = [{"role": "user", "content": texts[number % len(texts)]}, {"role": "assistant", "content": answer}]
        yield {"id": f"chat-{number}", "category": "chat", "conversations": turns}


if __name__ == "__main__":
    raise SystemExit(main())
