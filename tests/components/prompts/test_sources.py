"""Files as sources, JSONL and the data set's own parquet shards, alone and through the stage."""

import os
from pathlib import Path

import pyarrow as pa
import pytest

from components.chats.rows import write_rows
from components.contract.cli import main
from components.contract.errors import UserError
from components.contract.log import Log
from components.prompts import sources
from components.prompts.overlap import HeldOut
from components.prompts.read import Parts
from components.prompts.read import read as read_all
from components.store.backend import Store
from components.store.work import Work
from tests.components.prompts import nemotron
from tests.components.prompts.conftest import Stage, read


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "no prompts in it"),
        (b"\n\n", "no prompts in it"),
        (b'{"a": 1}\n{"a', "row 2 is not JSON"),
        (b"[1]", "row 1"),
        (b'{"a": "caf\xe9"}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b'{"a": "\\ud800"}', "row 1 is not JSON"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "row 1 is not JSON"),
    ],
)
def test_a_bad_jsonl_file_is_named(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(text)
    with pytest.raises(UserError, match=rf"questions\.jsonl.*{said}"):
        list(sources.of_files([path])[0].rows(0))


def test_a_bad_parquet_file_is_named(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "questions.parquet"
    path.write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match=r"questions\.parquet: not a parquet file"):
        list(sources.of_files([path])[0].rows(0))
    parquet.write_table(pyarrow.table({"text": ["Hi"]}), path)
    with pytest.raises(UserError, match=r"questions\.parquet: no prompts in it"):
        list(sources.of_files([path])[0].rows(0))
    not_utf8 = pyarrow.array([b"\xff"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"id": not_utf8, "messages": [[{"role": "user", "content": "Hi"}]]}), path)
    with pytest.raises(UserError, match=r"questions\.parquet: damaged"):
        list(sources.of_files([path])[0].rows(0))
    whole = path.read_bytes()
    path.write_bytes(whole[:-48] + bytes([0x0F]) * 40 + whole[-8:])
    with pytest.raises(UserError, match=r"questions\.parquet: not a parquet file"):
        list(sources.of_files([path])[0].rows(0))


@pytest.mark.parametrize("start", [0, 1, 1024, 1500, 2999, 3000])
def test_a_shard_is_read_from_any_row_on(tmp_path: Path, start: int) -> None:
    rows = [nemotron.row(f"Question {number}?", "stem") for number in range(3000)]
    paths = nemotron.write(tmp_path, "stem", [rows])
    write_rows(tmp_path / "stem.jsonl", rows)
    for shard in sources.of_files([*paths, tmp_path / "stem.jsonl"]):
        found = [(one["uuid"], one["messages"]) for one in shard.rows(start)]
        assert found == [(one["uuid"], one["messages"]) for one in rows[start:]]


def test_reading_a_shard_holds_a_row_group_of_it(tmp_path: Path) -> None:
    """Answers of random digits, which no compression makes small: 6 MB a row group."""
    rows = (nemotron.row(f"Question {n}?", "stem", answer=os.urandom(3000).hex()) for n in range(8000))
    (path,) = nemotron.write(tmp_path, "stem", [rows])
    assert path.stat().st_size > 40 << 20
    before = pa.total_allocated_bytes()
    most = max(pa.total_allocated_bytes() for _ in sources.of_files([path])[0].rows(0))
    assert most - before < 20 << 20


def test_a_draw_from_its_own_manifest_is_the_draw(repository: Path, stage: Stage) -> None:
    files = [str(path) for path in sorted((repository / "data").iterdir())]
    drawn = stage.run({"files": files}, {"count": 30})
    manifest = Path(stage.folder / "ids.txt")
    manifest.write_bytes(drawn.store.read(drawn.key("ids.txt")) or b"")
    assert "question" not in manifest.read_text()
    again = stage.run({"files": files, "manifest": [str(manifest)]}, {"count": 30})
    assert read(again) == read(drawn)
    assert again.metrics["dropped"]["not in the manifest"] == again.metrics["read"] - 30
    fewer = stage.run({"files": files, "manifest": [str(manifest)]}, {"count": 29})
    assert read(fewer) == read(drawn)[:29]


def test_a_manifest_of_another_data_set_is_an_error(
    repository: Path, stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(path) for path in sorted((repository / "data").iterdir())]
    manifest = Path(stage.folder / "ids.txt")
    for text, said in (("copy-stem\nelsewhere-1\nelsewhere-2\n", "2 of its 3 ids are not in"), ("\n", "no ids in it")):
        manifest.write_text(text)
        assert main("prompts", stage.argv({"count": 1}, {"files": files, "manifest": [str(manifest)]})) == 2
        assert said in capsys.readouterr().err


def test_a_byte_order_mark_and_an_escaped_pair_are_read(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"a": "\\ud83d\\ude00"}\n')
    assert list(sources.of_files([path])[0].rows(0)) == [{"a": "\U0001f600"}]


def test_a_damaged_page_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    (path,) = nemotron.write(tmp_path, "stem", [[nemotron.row(f"Question {n}?", "stem") for n in range(3000)]])
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 2] = b"\xff" * (len(data) // 2 - 4)
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"{path.name}: damaged"):
        list(sources.of_files([path])[0].rows(0))


@pytest.mark.parametrize("damage", [b"", b"PAR1 no", None])
def test_a_damaged_part_is_read_again_with_those_behind_it(tmp_path: Path, damage: bytes | None) -> None:
    def sources_read(folder: str, work: Work) -> list[list[str]]:
        parts = Parts(work, tmp_path / folder)
        read_all(shards, parts, None, None, HeldOut([]), Log("prompts"))
        return [parts.table(name, ["id"]).column("id").to_pylist() for name in parts.names()]

    write_rows(tmp_path / "a.jsonl", (nemotron.row(f"Question {number}?", "stem") for number in range(7)))
    shards = sources.of_files([tmp_path / "a.jsonl"])
    work = Work(Store(str(tmp_path / "store")), "_work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("components.prompts.read.PART_ROWS", 2)
        whole = sources_read("first", work)
        assert len(whole) == 4
        good = work.get("read/00000-00001") or b""
        work.put("read/00000-00001", good[:40] + b"\xff" * 60 + good[100:] if damage is None else damage)
        assert sources_read("second", work) == whole
