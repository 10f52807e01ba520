"""Fixtures of the renderers' tests."""

from collections.abc import Iterator

import pytest

from components.store.backend import Store
from pipelines import seaweed


@pytest.fixture(scope="module")
def s3_store(s3: dict[str, str]) -> Iterator[Store]:
    """An empty prefix of a real S3 server, the same in every session: its address is part of the golden files."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.items():
            patch.setenv(name, value)
        yield Store(f"s3://{seaweed.BUCKET}/golden")
