"""What docs/operations.md says of the images' sizes."""

import re

import pytest

from tests.images.sizes import ROOT, sizes

TEXT = (ROOT / "docs" / "operations.md").read_text()
TABLE = re.findall(r"^ +\| `(\w+)` \| (\d+) MB \| (\d+) MB \| (\d+) MB \| (.+) \|$", TEXT, re.MULTILINE)


def test_every_role_has_a_budget() -> None:
    assert [row[0] for row in TABLE] == ["core", "train", "vllm"]


@pytest.mark.slow
@pytest.mark.parametrize(("role", "packages", "largest"), [(one[0], *one[3:]) for one in TABLE])
def test_an_image_s_packages_are_as_told(role: str, packages: str, largest: str) -> None:
    """Ten per cent are for what a machine's own wheels differ by; tests/e2e holds whole images to their budget."""
    found = sizes(role)
    assert sum(found.values()) / 1e6 == pytest.approx(int(packages), rel=0.1)
    for name, size in (one.rsplit(" ", 1) for one in largest.split(", ")):
        assert found[name] / 1e6 == pytest.approx(int(size), rel=0.1)
