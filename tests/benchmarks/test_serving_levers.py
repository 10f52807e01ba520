import random

import lever_engine
import lever_table
import numpy as np
import pytest
import serving_levers
from lever_table import weight_bytes
from serving_levers import SIZES, VARIANTS, Variant

SIZE = SIZES["h200-qwen3.5-4b"]


def test_spans_that_overlap_are_counted_once():
    draw = random.Random(0)
    for _ in range(50):
        spans = [(start, start + draw.randrange(1, 30)) for start in draw.choices(range(200), k=draw.randrange(1, 20))]
        touched = np.zeros(300, dtype=bool)
        for start, end in spans:
            touched[start:end] = True
        assert lever_engine.covered(spans) == touched.sum()
    assert lever_engine.covered([]) == 0


def test_the_reference_reads_what_was_published_and_a_packed_head_less():
    assert weight_bytes(VARIANTS["reference"]) / 1e9 == pytest.approx(4.84, abs=0.02)
    head = 248320 * 2560
    assert weight_bytes(Variant()) - weight_bytes(Variant(head=4)) == 2 * (2 * head - head // 2 - 2 * head // 128)
    assert weight_bytes(Variant()) - weight_bytes(Variant(vocabulary=32768)) == 2 * (248320 - 32768) * 2560


def rows(name, answer_ms, busy_ms, session=1):
    """Return what a session gives of a variant whose prefill takes 10 ms, and on the GPU 4, in whatever regime."""
    found = [{"kind": "start", "seconds": 100.0}]
    for regime, (_, answer) in SIZE.regimes.items():
        for turn in range(1, 6):
            found.append({"kind": "prefill", "regime": regime, "round": turn, "seconds": 0.010})
            for accepted in SIZE.accepted:
                row = {"kind": "answer", "regime": regime, "acceptance": accepted, "round": turn}
                found.append(row | {"seconds": answer_ms / 1000})
        found.append({"kind": "prefill on the GPU", "regime": regime, "busy_ms": 4.0, "drafts": 1})
        found.append({"kind": "answer on the GPU", "regime": regime, "busy_ms": busy_ms, "drafts": 1 + answer // 4})
    return [{"session": session, "variant": name, **row} for row in found]


def test_a_variant_is_compared_with_the_reference_of_its_own_session():
    given = rows("reference", 110, 36) + rows("7 drafted", 60, 20)
    given += rows("reference", 400, 200, session=2) + rows("INT4 head", 200, 104, session=2)
    found = {
        (row["variant"], row["metric"], row.get("regime"), row.get("acceptance")): row
        for row in lever_table.table(given, VARIANTS, SIZE)
    }
    assert found["7 drafted", "speedup_over_reference_config", None, 4.0]["value"] == pytest.approx(110 / 60)
    assert found["INT4 head", "speedup_over_reference_config", None, 6.0]["value"] == pytest.approx(2)
    assert found["7 drafted", "gpu_ms_per_step", "short", None]["value"] == pytest.approx(16 / 32)
    assert found["7 drafted", "host_ms_per_step", "short", None]["value"] == pytest.approx(50 / 32 - 16 / 32)
    assert found["7 drafted", "gpu_time_ratio_to_reference", "short", None]["value"] == pytest.approx(0.5)
    assert found["INT4 head", "gpu_time_ratio_to_reference", "long", None]["value"] == pytest.approx(100 / 196)
    assert found["no window", "latency_ms", None, None]["value"] is None


def test_every_variant_is_what_its_name_says(tmp_path):
    serving_levers.make(SIZE, tmp_path)
    seen = []
    for name, variant in VARIANTS.items():
        given = serving_levers.arguments(variant, SIZE, tmp_path)
        target, drafter = serving_levers.folders(variant, SIZE, tmp_path)
        documents = tuple((folder / "config.json").read_text() for folder in (target, drafter))
        assert (documents, given, variant.env) not in seen, name
        seen.append((documents, given, variant.env))
    assert given["speculative_config"]["num_speculative_tokens"] == 15
    assert '"tie_word_embeddings": false' in (tmp_path / "head-4" / "config.json").read_text()
