from pathlib import Path

import pytest

from pipelines.reference import ROOT, documents
from tests.pipelines.planning import REGENERATE

DOCUMENTS = documents()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_committed_reference_is_current(path: Path) -> None:
    if REGENERATE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(DOCUMENTS[path])
    assert path.read_text() == DOCUMENTS[path], "stale; run python -m pipelines.reference"
