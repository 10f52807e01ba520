import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from components.checkpoint.tensors import INDEX, Tensors
from components.contract.errors import UserError


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": torch.arange(4), "b": torch.ones(2, 3)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(5)}, tmp_path / "two.safetensors")
    write_index(tmp_path, a="one.safetensors", b="one.safetensors", c="two.safetensors")
    return tmp_path


def write_index(folder: Path, **weight_map: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_reads_shards_and_single_files_alike(sharded: Path, tmp_path: Path):
    tensors = Tensors(sharded)
    assert set(tensors) == {"a", "b", "c"}
    assert torch.equal(tensors["a"], torch.arange(4))
    assert tensors.shape("b") == (2, 3)
    assert tensors.file("c") == sharded / "two.safetensors"
    assert "d" not in tensors
    (sharded / INDEX).unlink()
    assert set(Tensors(sharded)) == {"a", "b", "c"}


def test_reads_copies_and_parts_of_a_file(sharded: Path):
    matrix = torch.arange(7 * 5).view(7, 5).bfloat16()
    kinds = {"odd": torch.tensor([True, False, True]), "scalar": torch.tensor(2.5), "none": torch.ones(0, 3)}
    save_file({"c": torch.zeros(5), "m": matrix, **kinds}, sharded / "two.safetensors")
    tensors = Tensors(sharded)
    for name in tensors:
        read = tensors.read(name)
        assert (read.dtype, read.shape) == (tensors[name].dtype, tensors[name].shape)
        assert torch.equal(read, tensors[name])
        stream = tensors.stream(name)
        assert (stream.shape, stream.nbytes) == (tuple(read.shape), read.nbytes)
        assert sum(len(part) for part in stream.parts()) == read.nbytes
    rows = [part.clone().view(torch.bfloat16).view(-1, 5) for part in tensors.blocks("m", 2 * 5 * 2)]
    assert [len(part) for part in rows] == [2, 2, 2, 1]
    assert torch.equal(torch.cat(rows), matrix)


def test_a_file_that_is_cut_while_it_is_read(sharded: Path):
    save_file({"c": torch.zeros(5), "last": torch.zeros(1 << 20)}, sharded / "two.safetensors")
    tensors = Tensors(sharded)
    parts = tensors.stream("last").parts()
    next(parts)
    os.truncate(sharded / "two.safetensors", 2 << 20)
    with pytest.raises(UserError, match=r"two\.safetensors: last ends early; the file was cut"):
        list(parts)


def test_missing_shard(sharded: Path):
    (sharded / "two.safetensors").unlink()
    with pytest.raises(UserError, match=r"two\.safetensors: the index names this shard, for c, but"):
        Tensors(sharded)


def test_a_shard_one_byte_short(sharded: Path):
    data = (sharded / "two.safetensors").read_bytes()
    (sharded / "two.safetensors").write_bytes(data[:-1])
    with pytest.raises(UserError, match=r"two\.safetensors: truncated .*; it ends before c does"):
        Tensors(sharded)
    (sharded / "two.safetensors").write_bytes(data[:20])
    with pytest.raises(UserError, match=r"two\.safetensors: truncated or not a safetensors file \("):
        Tensors(sharded)


def test_index_names_an_absent_tensor(sharded: Path):
    write_index(sharded, a="one.safetensors", ghost="two.safetensors")
    with pytest.raises(UserError, match=r"ghost is in two\.safetensors, which does not hold it"):
        Tensors(sharded)


def test_one_tensor_in_two_shards(sharded: Path):
    save_file({"c": torch.zeros(5), "a": torch.arange(4)}, sharded / "two.safetensors")
    with pytest.raises(UserError, match="hold a; keep one"):
        Tensors(sharded)


def test_torn_index_empty_folder_and_unknown_tensor(sharded: Path, tmp_path: Path):
    with pytest.raises(UserError, match="no tensor z"):
        Tensors(sharded)["z"]
    (sharded / INDEX).write_text('{"weight_')
    with pytest.raises(UserError, match="the file is torn"):
        Tensors(sharded)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no \\*\\.safetensors"):
        Tensors(tmp_path / "empty")


@pytest.mark.parametrize("shard", [5, "../x.safetensors"])
def test_an_index_names_files_of_its_folder_alone(sharded: Path, shard: object):
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(UserError, match="not an index with a weight_map"):
        Tensors(sharded)
