import errno
import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.contract.errors import UserError
from components.sequences.packing import Documents, document, pack
from components.sequences.reader import read_split

EOS = 9


def row(prompt, answer, finish="stop", row_id="r"):
    return {"id": row_id, "prompt_token_ids": prompt, "token_ids": answer, "finish_reason": finish}


def test_separator_is_added_only_to_finished_answers_without_one():
    assert document(row([1, 2], [3, EOS]), EOS, 10, "all").ids.tolist() == [1, 2, 3, EOS]
    assert document(row([1, 2], [3, 4]), EOS, 10, "all").ids.tolist() == [1, 2, 3, 4, EOS]
    assert document(row([1, 2], [3, 4], "length"), EOS, 10, "all").ids.tolist() == [1, 2, 3, 4]


def test_counted_tokens():
    assert document(row([1, 2], [3, EOS]), EOS, 10, "all").mask.tolist() == [0, 1, 1, 1]
    assert document(row([1, 2], [3, 4]), EOS, 10, "all").mask.tolist() == [0, 1, 1, 1, 0]
    assert document(row([1, 2], [3, 4]), EOS, 10, "answer").mask.tolist() == [0, 0, 1, 1, 0]
    assert document(row([1, 2], [3, 4]), EOS, 10, "all_and_separator").mask.tolist() == [0, 1, 1, 1, 1]
    assert document(row([1, 2], [3, 4], "length"), EOS, 10, "all_and_separator").mask.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    "bad",
    [
        row([1, 99], [3]),
        row([], [3]),
        row([1, -1], [3]),
        row([1.7], [2.2]),
        row("12", "34"),
        row([[1, 2]], [[3, 4]], "length"),
        row([1, 2**40], [3]),
        {"id": "r", "token_ids": [1]},
        {"prompt_token_ids": [1], "token_ids": [2], "finish_reason": "stop"},
    ],
)
def test_bad_rows_are_named(bad):
    with pytest.raises(UserError, match=r"row (r|None)"):
        document(bad, EOS, 10, "all")


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 7)), min_size=1, max_size=12), st.integers(2, 9))
def test_chunks_hold_the_documents_in_order(tmp_path_factory, shapes, length):
    folder = tmp_path_factory.mktemp("packed")
    documents = [document(row([1] * p, [2 + i % 5] * a), EOS, 10, "all") for i, (p, a) in enumerate(shapes)]
    size = pack(documents, folder, "train", length, EOS)
    (folder / "index.json").write_text(json.dumps({"sequence_length": length, "splits": {"train": size}}))
    split = read_split(folder, "train")
    flat = np.concatenate([one.ids for one in documents])
    assert np.array_equal(split.ids.reshape(-1)[: len(flat)], flat)
    assert (split.ids.reshape(-1)[len(flat) :] == EOS).all()
    assert not split.mask.reshape(-1)[len(flat) :].any()
    assert split.ids.size - len(flat) < length
    assert not split.mask[:, 0].any()
    assert [flat[start] for start in split.starts] == [1] * len(documents)
    expected = [m for one in documents for m in one.mask]
    assert all(
        m == (expected[i] if i % length else 0) for i, m in enumerate(split.mask.reshape(-1)[: len(flat)].tolist())
    )
    assert size["counted"] == int(split.mask.sum())


def order(folder, documents, seed):
    kept = Documents(folder, f"order-{seed}", seed)
    for one in documents:
        kept.append(one)
    return list(kept.shuffled())


def test_order_depends_on_ids_and_seed_alone(tmp_path):
    documents = [document(row([1] * (1 + i % 3), [2] * i, row_id=str(i)), EOS, 10, "answer") for i in range(20)]
    ids = [one.row_id for one in order(tmp_path, documents, 1)]
    assert ids == [one.row_id for one in order(tmp_path, documents[::-1], 1)]
    assert ids != [one.row_id for one in order(tmp_path, documents, 2)]
    assert ids == sorted(map(str, range(20)), key=lambda name: hashlib.sha256(f"1:{name}".encode()).hexdigest())
    for one in order(tmp_path, documents, 1):
        assert np.array_equal(one.ids, documents[int(one.row_id)].ids)
        assert np.array_equal(one.mask, documents[int(one.row_id)].mask)


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(2, 9))
def test_positions_count_from_the_document_or_the_sequence(tmp_path_factory, lengths, length):
    folder = tmp_path_factory.mktemp("packed")
    documents = [document(row([1], [2] * (n - 1), "length"), EOS, 10, "all") for n in lengths]
    size = pack(documents, folder, "train", length, EOS)
    index = {"sequence_length": length, "boundaries": "reset", "splits": {"train": size}}
    (folder / "index.json").write_text(json.dumps(index))
    split = read_split(folder, "train")
    inside = [position for n in lengths for position in range(n)]
    inside += range(inside[-1] + 1, inside[-1] + 1 + split.ids.size - len(inside))
    for chunk in range(len(split)):
        expected = [min(at, inside[chunk * length + at]) for at in range(length)]
        assert split.positions(chunk).tolist() == expected


def test_a_short_file_is_refused(tmp_path):
    size = pack([document(row([1, 2], [3]), EOS, 10, "all")], tmp_path, "val", 2, EOS)
    (tmp_path / "index.json").write_text(json.dumps({"sequence_length": 2, "splits": {"val": size}}))
    (tmp_path / "val.bin").write_bytes(b"123")
    with pytest.raises(UserError, match=r"val\.bin"):
        read_split(tmp_path, "val")


@pytest.mark.parametrize("part", ["documents", "chunks"])
def test_a_full_disk_is_an_error_also_where_the_last_bytes_find_it(small_disk, tmp_path, part):
    documents = [document(row([1] * 50, [2] * 50, row_id=str(number)), EOS, 10, "all") for number in range(200)]
    tokens = sum(len(one.ids) for one in documents)
    (small_disk / "full").write_bytes(bytes((1 << 20) - tokens * 4 // 4096 * 4096))  # the ids, and not the masks

    def write() -> int | None:
        kept = Documents(small_disk if part == "documents" else tmp_path, "train", 0)
        try:
            for one in documents:
                kept.append(one)
            pack(kept.shuffled(), small_disk if part == "chunks" else tmp_path, "train", 64, EOS)
        except OSError as error:
            return error.errno
        return None

    assert write() == errno.ENOSPC
