import json
import resource
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from components.checkpoint import shards
from components.checkpoint.census import skeleton
from components.checkpoint.shards import HEADER_BYTES, TensorWriter
from components.checkpoint.stream import Stream
from components.checkpoint.tensors import INDEX, Tensors
from components.contract.errors import UserError

DTYPES = [torch.int64, torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.int8, torch.bool]
TENSORS = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=9)


@settings(deadline=None, max_examples=40)
@given(kinds=TENSORS, limit=st.sampled_from([40, 10**9]))
def test_the_library_reads_back_what_was_written(kinds: list, limit: int, tmp_path_factory: pytest.TempPathFactory):
    folder, generator = tmp_path_factory.mktemp("w"), torch.Generator().manual_seed(len(kinds))
    given = {
        f"t{number}": torch.randint(0, 2, shape, generator=generator).to(dtype)
        for number, (dtype, shape) in enumerate(kinds)
    }
    write(folder, *given.items(), limit=limit)
    files = sorted(folder.glob("*.safetensors"))
    back = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert set(back) == set(given)
    assert all(back[name].dtype == one.dtype and torch.equal(back[name], one) for name, one in given.items())
    assert set(Tensors(folder)) == set(given)
    with safe_open(files[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    if len(files) > 1:
        index = json.loads((folder / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(one.nbytes for one in given.values())
        assert all(sum(one.nbytes for one in load_file(file).values()) <= max(40, 5**3 * 8) for file in files)


def test_a_shard_holds_a_bounded_number_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "MAX_SHARD_TENSORS", 3)
    write(tmp_path, *((f"t{number}", torch.full((3,), number, dtype=torch.int8)) for number in range(7)))
    assert [len(load_file(file)) for file in sorted(tmp_path.glob("*.safetensors"))] == [3, 3, 1]


@settings(deadline=None, max_examples=20)
@given(kinds=TENSORS, limit=st.sampled_from([40, 10**9]))
def test_streams_are_written_as_the_tensors_are(kinds: list, limit: int, tmp_path_factory: pytest.TempPathFactory):
    source, copy = tmp_path_factory.mktemp("s"), tmp_path_factory.mktemp("c")
    tensors = ((f"t{number}", torch.full(shape, number).to(dtype)) for number, (dtype, shape) in enumerate(kinds))
    write(source, *tensors, limit=limit)
    stored = Tensors(source)
    write(copy, *((f"t{number}", stored.stream(f"t{number}")) for number in range(len(kinds))), limit=limit)
    files = [path.name for path in source.iterdir()]
    assert sorted(files) == sorted(path.name for path in copy.iterdir())
    assert all((source / name).read_bytes() == (copy / name).read_bytes() for name in files)


def test_a_stream_that_fails_is_an_error_and_nothing_is_left_running(tmp_path: Path):
    def parts(number: int) -> Iterator[torch.Tensor]:
        if number == 3:
            raise UserError("model.layers.3 is broken")
        yield torch.zeros(8, dtype=torch.uint8)

    streams = ((f"t{number}", Stream("U8", (8,), 8, partial(parts, number))) for number in range(500))
    threads = threading.active_count()
    with pytest.raises(UserError, match=r"layers\.3 is broken"):
        write(tmp_path, *streams)
    assert threading.active_count() == threads
    assert not list(tmp_path.glob("model*"))


def test_weights_without_values_are_refused(llama: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"model.embed_tokens.weight has no values \(device meta\)"):
        write(tmp_path, *skeleton(llama).named_parameters())
    with pytest.raises(UserError, match=r"x is torch\.complex64"):
        write(tmp_path, ("x", torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(ValueError, match="x is written twice"):
        write(tmp_path, ("x", torch.zeros(2)), ("x", torch.zeros(2)))


@pytest.mark.parametrize("after", [0, 1])
def test_a_write_that_fails_is_an_error_also_of_the_last_tensor(after: int, tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES + 1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path, *((f"t{number}", torch.ones(10**6)) for number in range(1 + after)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("model*"))


def test_a_full_disk_is_an_error_also_in_the_header(small_disk: Path):
    """Tensors come first and leave room before them, which costs nothing until the header is written there."""
    (small_disk / "other").write_bytes(bytes(900_000))
    with pytest.raises(OSError, match="No space left"):
        write(small_disk, ("t", torch.ones(1000)))
    assert not list(small_disk.glob("model*"))


def write(folder: Path, *tensors: tuple[str, torch.Tensor | Stream], limit: int = 10**9) -> None:
    with TensorWriter(folder, limit) as writer:
        for name, tensor in tensors:
            writer.add(name, tensor)
