"""Schedules: their values at, before and after every boundary, from the formulas of their sources."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.optim.schedules import constant, linear, named, piecewise, warmup_cosine, warmup_stable_decay

TRILLION = 10**12


def test_constant():
    schedule = constant(0.5)
    assert [schedule(tokens) for tokens in (0, 1, 23 * TRILLION)] == [0.5, 0.5, 0.5]


def test_piecewise_changes_at_the_boundary_token():
    balance_rate = piecewise([1e-3, 0.0], [15 * TRILLION])
    assert balance_rate(15 * TRILLION - 1) == 1e-3
    assert balance_rate(15 * TRILLION) == 0.0
    assert balance_rate(15 * TRILLION + 1) == 0.0
    three = piecewise([1.0, 2.0, 3.0], [10, 20])
    assert [three(tokens) for tokens in (0, 9, 10, 19, 20, 21)] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def test_warmup_cosine_of_glm45():
    """arXiv 2508.06471: 0 to 2.5e-4, cosine to 2.5e-5; the warmup length here is ours."""
    warmup, end = 10**9, 23 * TRILLION
    schedule = warmup_cosine(peak=2.5e-4, end=2.5e-5, warmup_tokens=warmup, end_tokens=end)
    assert schedule(0) == 0.0
    assert schedule(1) == pytest.approx(2.5e-4 / warmup, rel=1e-12)
    assert schedule(warmup // 2) == 2.5e-4 / 2
    assert schedule(warmup - 1) == 2.5e-4 * ((warmup - 1) / warmup) < 2.5e-4
    assert schedule(warmup) == 2.5e-4
    assert 2.5e-4 - 1e-12 < schedule(warmup + 10**6) <= 2.5e-4
    assert schedule((warmup + end) // 2) == pytest.approx((2.5e-4 + 2.5e-5) / 2, rel=1e-9)
    quarter = warmup + (end - warmup) // 4
    assert schedule(quarter) == pytest.approx(2.5e-5 + 2.25e-4 * (1 + math.sqrt(0.5)) / 2, rel=1e-9)
    assert schedule(end - 1) == pytest.approx(2.5e-5, rel=1e-12)
    assert [schedule(end), schedule(end + 1), schedule(2 * end)] == [2.5e-5] * 3


def test_warmup_stable_decay():
    schedule = warmup_stable_decay(peak=1.0, end=0.1, warmup_tokens=4, decay_start_tokens=100, end_tokens=110)
    assert [schedule(tokens) for tokens in (0, 1, 3, 4, 5, 99, 100)] == [0.0, 0.25, 0.75, 1.0, 1.0, 1.0, 1.0]
    assert schedule(101) == pytest.approx(0.91)
    assert schedule(109) == pytest.approx(0.19)
    assert [schedule(tokens) for tokens in (110, 111, 10**6)] == [0.1, 0.1, 0.1]


def test_linear():
    schedule = linear(0.0, 1.0, start_tokens=10, stop_tokens=20)
    assert [schedule(tokens) for tokens in (0, 9, 10, 11, 15, 19, 20, 21)] == [0, 0, 0, 0.1, 0.5, 0.9, 1, 1]


def test_pieces_of_no_tokens_are_skipped():
    no_warmup = warmup_cosine(peak=1.0, end=0.0, warmup_tokens=0, end_tokens=10)
    assert [no_warmup(0), no_warmup(10)] == [1.0, 0.0]
    no_decay = warmup_stable_decay(peak=1.0, end=0.5, warmup_tokens=2, decay_start_tokens=8, end_tokens=8)
    assert [no_decay(tokens) for tokens in (7, 8)] == [1.0, 0.5]
    step = linear(3.0, 4.0, start_tokens=5, stop_tokens=5)
    assert [step(4), step(5)] == [3.0, 4.0]


@pytest.mark.parametrize(
    "schedule",
    [
        constant(2.0),
        piecewise([1.0, 2.0, 3.0], [10, 20]),
        linear(1.0, 3.0, start_tokens=10, stop_tokens=30),
        warmup_cosine(peak=1.0, end=0.25, warmup_tokens=16, end_tokens=48),
        warmup_stable_decay(peak=1.0, end=0.25, warmup_tokens=16, decay_start_tokens=32, end_tokens=48),
    ],
)
def test_a_traced_scalar_gives_what_a_python_number_gives(schedule):
    tokens = jnp.arange(64)
    values = jax.jit(jax.vmap(schedule))(tokens)
    assert values.dtype == jnp.float32
    assert values.tolist() == pytest.approx([schedule(int(t)) for t in tokens], rel=1e-6, abs=1e-7)


def test_a_boundary_of_trillions_holds_when_traced():
    schedule = jax.jit(piecewise([1.0, 2.0], [15 * TRILLION]))
    assert schedule(jnp.float32(14.9e12)) == 1.0
    assert schedule(jnp.float32(15.1e12)) == 2.0
    assert schedule(jnp.int32(2**31 - 1)) == 1.0


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=3).map(sorted), st.integers(0, 1100))
def test_wsd_stays_between_zero_and_peak(boundaries, tokens):
    warmup, decay, end = boundaries
    schedule = warmup_stable_decay(
        peak=1.0, end=0.1, warmup_tokens=warmup, decay_start_tokens=decay, end_tokens=end
    )
    assert 0.0 <= schedule(tokens) <= 1.0
    assert tokens < end or schedule(tokens) == 0.1


def test_wrong_boundaries_are_refused():
    with pytest.raises(ValueError, match=r"found boundaries \[10, 5\] tokens"):
        warmup_cosine(peak=1.0, end=0.0, warmup_tokens=10, end_tokens=5)
    with pytest.raises(ValueError, match="found 2 values and 2 boundaries, expected one more value"):
        piecewise([1.0, 2.0], [1, 2])


def test_kinds_by_name():
    """Worked by hand: warmup 10 to a peak of 1, total 110, final 0.2, wsd's decay the last 20."""
    settings = dict(peak=1.0, final=0.2, warmup_tokens=10, total_tokens=110)
    at = (0, 5, 10, 60, 90, 100, 110, 120)
    assert [named("constant", peak=1.0, warmup_tokens=10)(t) for t in at] == [0, 0.5, 1, 1, 1, 1, 1, 1]
    expected = [0, 0.5, 1, 0.6, 0.36, 0.28, 0.2, 0.2]
    assert [named("linear", **settings)(t) for t in at] == pytest.approx(expected)
    assert [named("wsd", **settings, decay_tokens=20)(t) for t in at] == pytest.approx(
        [0, 0.5, 1, 1, 1, 0.6, 0.2, 0.2]
    )
    assert [named("cosine", **settings)(t) for t in (10, 60, 110)] == pytest.approx([1, 0.6, 0.2])
    with pytest.raises(ValueError, match="found 'step', expected one of"):
        named("step", peak=1.0)
    with pytest.raises(ValueError, match="schedule wsd: needs total_tokens, and wsd decay_tokens"):
        named("wsd", peak=1.0, total_tokens=100)
