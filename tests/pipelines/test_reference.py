import re
from pathlib import Path

import pytest

from components.contract.stage import load
from pipelines.recipe import TASKS
from pipelines.reference import ROOT, documents
from tests.pipelines.planning import REGENERATE

DOCUMENTS = documents()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_committed_reference_is_current(path: Path) -> None:
    if REGENERATE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(DOCUMENTS[path])
    assert path.read_text() == DOCUMENTS[path], "stale; run python -m pipelines.reference"


@pytest.mark.parametrize("stage", sorted(set(TASKS.values())))
def test_the_formats_name_every_file_of_a_stage(stage: str) -> None:
    text = (ROOT / "docs/formats.md").read_text()
    named = [name for name in load(stage).OUTPUTS if re.fullmatch(r"[\w./-]+", name)]
    assert f"`{stage}`" in text
    assert [name for name in named if f"`{name}`" not in text] == []
