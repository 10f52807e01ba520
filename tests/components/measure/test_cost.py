"""The cost model against values worked out by hand."""

import pytest

from components.checkpoint.step_bytes import Model
from components.measure.cost import (
    Constants,
    Gpu,
    Measured,
    Request,
    fit,
    implied_acceptance,
    predict,
    prefill_flops,
)

GPU = Gpu(bandwidth=1000.0, flops=1e6)
TARGET = Model(linears=80, head=20, unread=5, parameters=40, head_parameters=10, key_value=1, state=0, attention=2)
DRAFTER = Model(10, 0, 0, 5, 0, key_value=1, state=0, attention=1, window=4, block_size=4)
CONSTANTS = Constants(memory=0.5, compute=0.25)


def test_flops_of_a_prompt():
    assert prefill_flops(TARGET, 3) == 2 * 40 * 3 + 2 * 6 + 2 * 10


def test_a_request_by_hand():
    found = predict(GPU, CONSTANTS, Request(10, 21), TARGET)
    assert found.steps == 20
    assert found.step == pytest.approx((100 + 20) / 500)
    assert found.prefill == pytest.approx(100 / 500)  # 930 FLOPs at 250,000 a second are less
    assert found.seconds == pytest.approx(0.2 + 20 * 0.24)


def test_a_drafter_adds_its_bytes_and_divides_the_steps():
    found = predict(GPU, CONSTANTS, Request(10, 21, accepted=4), TARGET, DRAFTER)
    assert found.steps == 5
    assert found.step == pytest.approx((100 + 20 + 10 + 20 + 4) / 500)


def test_a_long_prompt_is_bound_by_arithmetic():
    found = predict(GPU, CONSTANTS, Request(5000, 2), TARGET)
    assert found.prefill == pytest.approx((2 * 40 * 5000 + 5000 * 5001 + 20) / 250_000)


def test_the_host_shows_only_where_the_device_is_faster():
    slow = Constants(0.5, 0.25, host_prefill=0.1, host_step=0.3, host_draft_step=0.2)
    assert predict(GPU, slow, Request(10, 21), TARGET).step == 0.3
    assert predict(GPU, slow, Request(10, 21), TARGET).prefill == pytest.approx(0.2)
    assert predict(GPU, slow, Request(10, 21, 4), TARGET, DRAFTER).step == pytest.approx(154 / 500)


@pytest.mark.parametrize("prompts", [(10, 5000), (4000, 5000)])
def test_fitting_finds_the_constants_that_made_the_rows(prompts):
    rows = []
    for prompt in prompts:
        request = Request(prompt, 21 if prompt == prompts[0] else 400)
        rows.append(Measured(request, TARGET, None, predict(GPU, CONSTANTS, request, TARGET).seconds))
    found = fit(GPU, *rows)
    assert found is not None
    assert (found.memory, found.compute) == pytest.approx((0.5, 0.25))
    assert fit(GPU, rows[0], rows[0]) is None


def test_the_implied_acceptance_undoes_a_prediction():
    request = Request(10, 21, accepted=2.5)
    found = predict(GPU, CONSTANTS, request, TARGET, DRAFTER)
    assert implied_acceptance(found.seconds, found, request) == pytest.approx(2.5)
