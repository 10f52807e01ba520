"""Digests: what enters, what does not, and numbers as RFC 8785 writes them."""

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError

from components.contract.digest import StageConfig, digested, runtime, stage_digest


class Inner(StageConfig):
    rate: float = Field(1e-6, description="a rate")
    shards: int = runtime(4, "processes")


class Outer(StageConfig):
    inner: Inner = Field(Inner(), description="nested")
    many: list[Inner] = Field([], description="a list of nested")
    named: dict[str, Inner] = Field({}, description="a mapping of nested")
    name: str = Field("x", description="a name")
    workers: int = runtime(2, "processes", ge=1)


def digest(config: BaseModel, **changes) -> str:
    given = {"stage": "probe", "version": 1, "config": config, "inputs": {"a": ["1" * 64]}, "salt": None} | changes
    return stage_digest(**given)


def test_the_digest_is_the_sha256_of_the_canonical_form_written_out():
    canonical = (
        '{"config":{"inner":{"rate":0.000001},"many":[],"name":"\u00e9","named":{}},'
        '"inputs":{"a":["' + "1" * 64 + '"]},"salt":null,"stage":"probe","version":1}'
    )
    assert digest(Outer(name="\u00e9")) == hashlib.sha256(canonical.encode()).hexdigest()


@pytest.mark.parametrize(
    ("number", "form"),
    [(1.0, "1"), (1e21, "1e+21"), (1e-7, "1e-7"), (1e-6, "0.000001"), (-0.0, "0"), (0.1, "0.1"), (5e-324, "5e-324")],
)
def test_numbers_have_their_rfc_8785_form(number: float, form: str):
    class One(StageConfig):
        value: float = Field(description="a number")

    canonical = '{"config":{"value":' + form + '},"inputs":{},"salt":null,"stage":"probe","version":1}'
    assert digest(One(value=number), inputs={}) == hashlib.sha256(canonical.encode()).hexdigest()


def test_runtime_fields_stay_out_wherever_they_are():
    config = Outer(workers=9, inner=Inner(shards=8), many=[Inner(shards=1)], named={"k": Inner(shards=7)})
    other = Outer(workers=1, inner=Inner(shards=2), many=[Inner(shards=3)], named={"k": Inner(shards=5)})
    assert digest(config) == digest(other)
    assert "shards" not in json.dumps(digested(config))
    assert "workers" not in json.dumps(digested(config))


def test_everything_else_enters():
    base = Outer()
    digests = {
        digest(base),
        digest(base, stage="other"),
        digest(base, version=2),
        digest(base, salt="s"),
        digest(base, inputs={"b": ["1" * 64]}),
        digest(base, inputs={"a": ["2" * 64]}),
        digest(base, inputs={"a": ["1" * 64, "2" * 64]}),
        digest(base, inputs={"a": ["2" * 64, "1" * 64]}),
        digest(Outer(name="y")),
        digest(Outer(inner=Inner(rate=2e-6))),
        digest(Outer(many=[Inner()])),
    }
    assert len(digests) == 11


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=20), st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 99))
def test_the_same_values_give_the_same_digest_however_they_were_given(name: str, rate: float, workers: int):
    given_in_code = Outer(name=name, inner=Inner(rate=rate), workers=workers)
    read_back = Outer.model_validate_json(given_in_code.model_dump_json())
    assert digest(read_back) == digest(given_in_code)
    reordered = dict(reversed(json.loads(given_in_code.model_dump_json()).items()))
    assert digest(Outer.model_validate(reordered)) == digest(given_in_code)


def test_unknown_fields_and_changes_are_refused():
    with pytest.raises(ValidationError, match="nmae"):
        Outer.model_validate({"nmae": "x"})
    with pytest.raises(ValidationError, match="frozen"):
        Outer().name = "y"  # type: ignore[misc]
