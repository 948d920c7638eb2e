"""Gate, sampler and recovery against hand calculation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_bridge.trajectories.gate import Gate, fresh_mask, fresh_tokens, passes
from rollout_bridge.trajectories.groups import Boundary, recovery_slots
from rollout_bridge.trajectories.sampler import draw_order, length_bin
from rollout_bridge.trajectories.schema import Status

OK, BAD, LATE, MAL = Status.OK, Status.ENVIRONMENT_FAILURE, Status.TIMEOUT, Status.MALFORMED


def test_gate_by_hand() -> None:
    # Versions 4, 5 and 7 are of optimizer steps 20, 28 and 30; at step 30, lag at most 2, 5 is fresh and 4 is
    # not. 4 tokens at 4, 6 at 5: 6 of 10 fresh.
    steps = {-1: 0, 4: 20, 5: 28, 7: 30}
    counts = [(4, 4), (5, 6)]

    def lag(version: int) -> int:
        return 30 - steps[version]

    assert fresh_tokens(counts, lag=lag, max_lag=2) == 6
    assert passes(counts, lag=lag, gate=Gate(max_lag=2, min_fresh_fraction=0.6))
    assert not passes(counts, lag=lag, gate=Gate(max_lag=2, min_fresh_fraction=0.61))
    assert not passes(counts, lag=lag, gate=Gate(max_lag=1, min_fresh_fraction=0.0)), (
        "nothing fresh, nothing used"
    )
    mask = fresh_mask(np.array([-1, 4, 5, 7]), np.array([False, True, True, True]), lag=lag, max_lag=2)
    assert mask.tolist() == [False, False, True, True]


@given(
    counts=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=4),
    version=st.integers(0, 12),
    lag=st.integers(0, 4),
    fraction=st.floats(0, 1),
)
def test_what_the_gate_refuses_stays_refused(counts, version, lag, fraction) -> None:
    gate = Gate(max_lag=lag, min_fresh_fraction=fraction)
    if not passes(counts, lag=lambda older: version - older, gate=gate):
        assert not passes(counts, lag=lambda older: version + 1 - older, gate=gate)


def test_gate_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"min_fresh_fraction: 1.4 is not in \[0, 1\]"):
        Gate(max_lag=4, min_fresh_fraction=1.4)


@dataclass(frozen=True)
class Item:
    tokens: int
    age: int

    @property
    def age_key(self) -> tuple[int]:
        return (self.age,)


def test_sampler_by_hand() -> None:
    # Bins [0,10), [10,20), [20,..): short has ages 3 1 2, middle none, long 5 4.
    items = [Item(5, 3), Item(9, 1), Item(20, 5), Item(7, 2), Item(99, 4)]
    assert [length_bin(n, (10, 20)) for n in (9, 10, 19, 20)] == [0, 1, 1, 2]
    order = list(draw_order(items, edges=(10, 20), cursor=0))
    assert [item.age for item, _ in order] == [1, 4, 2, 5, 3]
    assert [cursor for _, cursor in order] == [1, 0, 1, 0, 1]
    assert [item.age for item, _ in draw_order(items, edges=(10, 20), cursor=1)] == [4, 1, 5, 2, 3]


@given(
    lengths=st.lists(st.integers(1, 99), max_size=30),
    cursor=st.integers(0, 3),
    seed=st.randoms(use_true_random=False),
)
def test_sampler_is_a_permutation_that_ignores_the_order_given_and_is_even(lengths, cursor, seed) -> None:
    items = [Item(tokens, age) for age, tokens in enumerate(lengths)]
    edges = (10, 30, 60)
    order = [item for item, _ in draw_order(items, edges=edges, cursor=cursor)]
    assert sorted(item.age for item in order) == list(range(len(items)))
    seed.shuffle(items)
    assert order == [item for item, _ in draw_order(items, edges=edges, cursor=cursor)]
    drawn: Counter[int] = Counter()
    size = Counter(length_bin(item.tokens, edges) for item in items)
    for item in order:
        drawn[length_bin(item.tokens, edges)] += 1
        unspent = [drawn[b] for b in size if drawn[b] < size[b]]
        # A bin with something left is never more than one draw behind any other.
        assert not unspent or max(drawn.values()) - min(unspent) <= 1


@pytest.mark.parametrize(
    ("statuses", "boundary", "slots"),
    [
        ([OK, OK, OK, OK], Boundary.INCLUSIVE, (1, 1, 1, 1)),
        ([OK, BAD, LATE, MAL], Boundary.INCLUSIVE, (2, 0, 0, 2)),  # exactly half is left
        ([OK, BAD, LATE, MAL], Boundary.EXCLUSIVE, None),
        ([BAD, OK, OK, OK], Boundary.EXCLUSIVE, (0, 2, 1, 1)),
        ([BAD, BAD, OK], Boundary.INCLUSIVE, None),
        ([BAD], Boundary.INCLUSIVE, None),
    ],
)
def test_recovery_by_hand(statuses, boundary, slots) -> None:
    assert recovery_slots(statuses, min_valid_fraction=0.5, boundary=boundary) == slots


def test_nothing_valid_is_discarded_whatever_the_fraction() -> None:
    assert recovery_slots([BAD, LATE], min_valid_fraction=0.0, boundary=Boundary.INCLUSIVE) is None


@given(statuses=st.lists(st.sampled_from(list(Status)), min_size=1, max_size=9))
def test_recovery_restores_the_size_evenly(statuses) -> None:
    slots = recovery_slots(statuses, min_valid_fraction=0.3, boundary=Boundary.INCLUSIVE)
    if slots is not None:
        assert sum(slots) == len(statuses)
        valid = [n for n, status in zip(slots, statuses, strict=True) if status in (OK, MAL)]
        assert sum(valid) == sum(slots) and max(valid) - min(valid) <= 1
