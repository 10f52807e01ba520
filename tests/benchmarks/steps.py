"""Stages of a study, each run by its own command line on a store, as soon as what it reads is committed there."""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import study

from components.chats.rows import Row, write_rows
from components.contract.invocation import invocation
from components.contract.stage import load
from components.store.artifact import Artifact, commit, read_manifest, split_uri
from components.store.backend import Store

TRIES = 3


@dataclass(frozen=True)
class Step:
    """One stage of a study: how to run it, what it reads, and where it commits."""

    argv: tuple[str, ...]
    uri: str
    needs: tuple["Step", ...]

    @property
    def artifact(self) -> Artifact | None:
        """What it committed."""
        store, stage, digest = split_uri(self.uri)
        return read_manifest(Store(store), stage, digest)

    @property
    def done(self) -> bool:
        """Whether its artifact is committed."""
        return self.artifact is not None


class Steps(dict[str, Step]):
    """Every step of a study by name, on one store."""

    def __init__(self, store: str) -> None:
        super().__init__()
        self.store = store

    def add(self, name: str, stage: str, config: dict[str, Any], **inputs: Step | None) -> Step:
        """Add a stage; drafters train as ``drafter_arms.py`` does."""
        bound = {port: step for port, step in inputs.items() if step}
        parsed = load(stage).Config(**config)
        call = invocation(stage, self.store, parsed, {port: [step.uri] for port, step in bound.items()})
        argv = call.argv
        if stage == "drafter":
            argv = (str(Path(__file__).with_name("drafter_arms.py")), *argv[2:])
        self[name] = Step(argv, call.uri, tuple(bound.values()))
        return self[name]

    def given(self, stage: str, rows: list[Row]) -> Step:
        """Commit rows as an artifact of a stage, unless they are there."""
        digest = sha256(json.dumps(rows).encode()).hexdigest()
        uri = Store(self.store).uri(f"{stage}/{digest}")
        if read_manifest(Store(self.store), stage, digest) is None:
            commit_rows(uri, rows)
        return Step((), uri, ())

    def made(self, name: str, stage: str, argv: Sequence[str], *needs: Step) -> Step:
        """Add a step that a study's own command makes: it commits rows at the step's address."""
        digest = sha256(json.dumps([name, *(need.uri for need in needs)]).encode()).hexdigest()
        self[name] = Step(tuple(argv), Store(self.store).uri(f"{stage}/{digest}"), needs)
        return self[name]


def commit_rows(uri: str, rows: list[Row]) -> None:
    """Commit rows at an artifact's address."""
    store, stage, digest = split_uri(uri)
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder, "part-00000.jsonl"), rows)
        manifest = {"version": 1, "config": {}, "inputs": {}, "salt": None, "metrics": {}, "versions": {}}
        commit(Store(store), stage, digest, Path(folder), manifest)


def run(steps: dict[str, Step], names: Iterable[str], jobs: int, logs: Path) -> int:
    """Run the named steps, the first that can be first, ``jobs`` at once; return how many never came about.

    A step that failed three times is given up, with those that read what it would have written.
    """
    waiting, tries, failed = list(names), Counter[str](), set[str]()
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    logs.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        for name, (process, began) in list(running.items()):
            if process.poll() is None:
                continue
            del running[name]
            print(f"{name}: exit {process.returncode} after {time.monotonic() - began:.0f} s", flush=True)
            if process.returncode and tries[name] < TRIES:
                waiting.insert(0, name)
            elif process.returncode:
                failed.add(steps[name].uri)
        for name in list(waiting):
            step = steps[name]
            if step.done:
                waiting.remove(name)
            elif any(need.uri in failed for need in step.needs):
                waiting.remove(name)
                failed.add(step.uri)
            elif len(running) < jobs and all(need.done for need in step.needs):
                waiting.remove(name)
                tries[name] += 1
                with (logs / f"{name.replace(' ', '-')}.log").open("ab") as log:
                    process = subprocess.Popen([sys.executable, *step.argv], stdout=log, stderr=log, cwd=study.ROOT)
                running[name] = process, time.monotonic()
        time.sleep(0.5)
    return len(failed)
