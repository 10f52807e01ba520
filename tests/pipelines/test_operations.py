"""The commands of docs/operations.md exist, with the options that it gives them."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from pipelines.cli import app

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^ *```\n(.*?)^ *```$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE | re.DOTALL)
COMMANDS = [line.strip() for block in BLOCKS for line in block.splitlines()]


def parse(words: list[str]) -> None:
    """Let the command line's own parser take a command; nothing runs."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, words)


def test_every_line_is_a_command() -> None:
    assert {line.split()[0] for line in COMMANDS} == {"qdflash", "kubectl", "docker", "export"}


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("qdflash ")])
def test_qdflash_takes_it(line: str) -> None:
    parse(shlex.split(line, comments=True)[1:])


def test_the_parser_refuses_what_is_not_there() -> None:
    for words, fault in (
        (["images", "build"], "base"),
        (["wait", "RUN", "--retry-often", "5"], "retry-often"),
        (["resubmit", "RUN"], "resubmit"),
    ):
        with pytest.raises(Exception, match=fault):
            parse(words)


def test_what_is_applied_renders() -> None:
    kubectl = Path(sys.executable).with_name("kubectl")
    folders = {line.split(" -k ")[1].split()[0] for line in COMMANDS if " -k " in line}
    assert folders
    for folder in folders:
        done = subprocess.run([kubectl, "kustomize", ROOT / folder], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
