"""The image's recipe, as far as it can be checked where nothing builds images; tests/e2e builds one."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from docker.utils.build import exclude_paths

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "images" / "Dockerfile"
CODE = ("components", "pipelines")


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def context() -> set[str]:
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    return {path for path in exclude_paths(str(ROOT), patterns) if (ROOT / path).is_file()} - {".dockerignore"}


def files(*names: str) -> set[str]:
    found = [path for name in names for path in (ROOT / name, *(ROOT / name).rglob("*"))]
    return {str(path.relative_to(ROOT)) for path in found if path.is_file() and "__pycache__" not in path.parts}


def test_the_context_holds_what_is_copied_and_no_more() -> None:
    copied = [rest for kind, rest in instructions() if kind == "COPY" and not rest.startswith("--from")]
    sources = [word.replace("${LOCK}", "core") for rest in copied for word in rest.split()[:-1]]
    locks = {f"locks/{path.name}" for path in (ROOT / "locks").glob("*.txt")}
    assert files("components/pack", "pipelines/recipes/smol.yaml") < files(*sources)
    assert context() == files(*sources) | locks


def test_the_image_runs_as_nobody_from_a_base_that_is_given() -> None:
    last = instructions()[max(i for i, (kind, _) in enumerate(instructions()) if kind == "FROM") :]
    assert last[0] == ("FROM", "${BASE}")
    assert [rest for kind, rest in instructions() if kind == "ARG" and rest.startswith("BASE")] == ["BASE", "BASE"]
    kinds = dict(last)
    assert kinds["USER"].split(":")[0].isdigit()
    assert int(kinds["USER"].split(":")[0]) > 0
    assert kinds["ENTRYPOINT"] == '["python"]'
    assert not {"RUN", "ADD", "VOLUME"} & {kind for kind, _ in last}
    assert [rest.split()[-1] for kind, rest in last if kind == "COPY"] == ["/opt/venv", "/opt/qdflash", "/state"]


def test_hadolint_finds_nothing_and_would(tmp_path: Path) -> None:
    def found(path: Path) -> list[str]:
        hadolint = Path(sys.executable).with_name("hadolint")
        done = subprocess.run([hadolint, "--format", "gnu", path], capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        assert bool(lines) == bool(done.returncode), done.stderr
        return re.findall(r"(?:DL|SC)\d+", done.stdout)

    assert found(DOCKERFILE) == []
    spoilt = tmp_path / "Dockerfile"
    spoilt.write_text(DOCKERFILE.read_text().replace("--no-cache-dir ", "") + "RUN cd /tmp && echo $HOME\n")
    assert found(spoilt) == ["DL3042", "DL3003"]


def test_the_installed_code_is_whole(tmp_path: Path) -> None:
    """What ``pip install --target`` makes of the context has every file, and its stages start from there."""
    for path in sorted(context()):
        (tmp_path / "build" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, tmp_path / "build" / path)
    code, options = tmp_path / "code", ("--quiet", "--no-deps", "--no-build-isolation")
    train = Path(sys.prefix).parent / "train/bin/python"  # the role that has pip and setuptools
    subprocess.run([train, "-m", "pip", "install", *options, "--target", code, tmp_path / "build"], check=True)
    installed = {str(path.relative_to(code)) for path in code.rglob("*")}
    assert files(*CODE) <= installed
    environment = {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1", "PATH": os.environ["PATH"]}
    ask = "import components.prompts as p, pipelines; print(p.__file__, pipelines.__file__)"
    asked = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert asked.stdout.split() == [str(code / name / "__init__.py") for name in ("components/prompts", "pipelines")]
    stage = [sys.executable, "-m", "components.prompts", "--help"]
    assert subprocess.run(stage, env=environment, cwd=tmp_path, capture_output=True, check=False).returncode == 0
