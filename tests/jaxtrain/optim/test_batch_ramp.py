"""Batch ramp: GLM-4.5's numbers, whole microbatches, and no memory but tokens seen."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.optim.batch_ramp import BatchRamp

MILLION, BILLION = 10**6, 10**9
GLM45 = BatchRamp(
    start_tokens=16 * MILLION, end_tokens=64 * MILLION, ramp_tokens=500 * BILLION, microbatch_tokens=MILLION
)


def test_glm45_ramp():
    """arXiv 2508.06471: 16M to 64M tokens over 500B, a straight line, then constant."""
    at = {
        0: 16,
        125 * BILLION: 28,
        250 * BILLION: 40,
        500 * BILLION - 1: 64,
        500 * BILLION: 64,
        23 * 10**12: 64,
    }
    assert {tokens: GLM45.microbatches(tokens) for tokens in at} == at


def test_rounding_changes_half_a_microbatch_past_a_whole_one():
    half = 500 * BILLION // 96  # 16.5 microbatches, rounded down to a whole token: just under a half
    assert [GLM45.microbatches(tokens) for tokens in (half, half + 1)] == [16, 17]


def test_constant_and_falling_batches():
    constant = BatchRamp(start_tokens=4, end_tokens=8, ramp_tokens=0, microbatch_tokens=4)
    assert [constant.microbatches(t) for t in (0, 1)] == [2, 2]
    falling = BatchRamp(start_tokens=8, end_tokens=4, ramp_tokens=8, microbatch_tokens=1)
    assert [falling.microbatches(t) for t in (0, 2, 8)] == [8, 7, 4]


def test_at_least_one_microbatch():
    assert BatchRamp(start_tokens=1, end_tokens=1, ramp_tokens=0, microbatch_tokens=100).microbatches(0) == 1


@given(
    st.integers(1, 10**9),
    st.integers(1, 10**9),
    st.integers(0, 10**13),
    st.integers(1, 10**8),
    st.integers(0, 10**14),
)
def test_equals_the_line_in_rational_arithmetic(start, end, ramp_tokens, microbatch, tokens):
    fraction = Fraction(min(tokens, ramp_tokens), ramp_tokens) if ramp_tokens else Fraction(1)
    exact = (start + (end - start) * fraction) / microbatch
    ramp = BatchRamp(
        start_tokens=start, end_tokens=end, ramp_tokens=ramp_tokens, microbatch_tokens=microbatch
    )
    assert ramp.microbatches(tokens) == max(1, (exact + Fraction(1, 2)).__floor__())


def test_a_resumed_run_takes_the_batches_of_an_uninterrupted_one():
    def batches(tokens, steps):
        taken = []
        for _ in range(steps):
            taken.append(ramp.microbatches(tokens))
            tokens += taken[-1] * ramp.microbatch_tokens
        return taken, tokens

    ramp = BatchRamp(start_tokens=12, end_tokens=40, ramp_tokens=300, microbatch_tokens=4)
    whole, _ = batches(0, 20)
    first, tokens_in_checkpoint = batches(0, 7)
    second, _ = batches(tokens_in_checkpoint, 13)
    assert first + second == whole
    assert whole[0] == 3 and whole[-1] == 10


@pytest.mark.parametrize(
    ("field", "value"),
    [("start_tokens", 0), ("microbatch_tokens", 0), ("ramp_tokens", -1)],
)
def test_wrong_settings_name_the_field(field, value):
    settings = dict(start_tokens=4, end_tokens=8, ramp_tokens=10, microbatch_tokens=4)
    with pytest.raises(ValueError, match=f"batch_ramp.{field}: found {value}"):
        BatchRamp(**(settings | {field: value}))
    with pytest.raises(ValueError, match="found -1 tokens seen"):
        BatchRamp(**settings).microbatches(-1)
