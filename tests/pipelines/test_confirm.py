"""What the confirmation measures again, and how it ends without anything to confirm."""

from pathlib import Path

import pytest

from components.store import Artifact, Store
from pipelines.confirm import elsewhere, main


def test_what_was_measured_on_another_machine_is_measured_again(tmp_path: Path) -> None:
    def measured(name: str) -> Artifact:
        return Artifact(Store(str(tmp_path)), "measure", "a" * 64, {"metrics": {"machine": {"name": name}}})

    found = {
        "measure_baseline": measured("NVIDIA H200"),
        "measure_pair": measured("NVIDIA A10G"),
        "measure_window": measured("NVIDIA H200"),  # the bundle is made of it
        "qad": Artifact(Store(str(tmp_path)), "qad", "b" * 64, {"metrics": {}}),
    }
    assert elsewhere(found, "NVIDIA A10G") == ["measure_baseline"]
    assert elsewhere(found, "NVIDIA L4") == ["measure_baseline", "measure_pair"]


def test_a_store_without_the_run_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("QDFLASH_STORE", str(tmp_path / "store"))
    assert main(["tiny", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "tiny: its bundle is not in this store" in said
    assert said.count("\n") == 1
