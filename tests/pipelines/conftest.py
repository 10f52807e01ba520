"""Fixtures of the renderers' tests."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from components.store.backend import Store
from pipelines import seaweed
from pipelines.plan import Plan
from tests.pipelines.planning import Render, plan_of


@pytest.fixture(scope="module")
def s3_store(s3: dict[str, str]) -> Iterator[Store]:
    """An empty prefix of a real S3 server, the same in every session: its address is part of the golden files."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.items():
            patch.setenv(name, value)
        yield Store(f"s3://{seaweed.BUCKET}/golden")


@pytest.fixture(scope="module")
def rendered(request: pytest.FixtureRequest, s3_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Plan a recipe on the empty store and compile it with the module's own ``compile_plan``, once per module."""

    @cache
    def render(path: Path) -> tuple[Plan, str]:
        plan = plan_of(s3_store, path)
        output = tmp_path_factory.mktemp(path.stem) / "rendered.yaml"
        request.module.compile_plan(plan, output)
        return plan, output.read_text()

    return render
