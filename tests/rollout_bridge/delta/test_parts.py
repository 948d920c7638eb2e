"""The parts of the codec: integers as symbols, value steps, the coder, ranks in classes, tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollout_bridge.delta import classes, models, rans, symbols
from rollout_bridge.delta.directory import Directory
from tests.rollout_bridge.delta.updates import DTYPES


@given(hnp.arrays(np.int64, st.integers(0, 50), elements=st.integers(0, (1 << 48) - 1)))
def test_integers_survive_as_symbols_and_extra_bits(values: np.ndarray) -> None:
    coded = symbols.symbols_of(values)
    extra = symbols.pack_extra(values, coded)
    assert len(extra) == symbols.extra_size(coded)
    np.testing.assert_array_equal(symbols.unpack_extra(extra, coded), values)


@given(DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, (2, 30))))
def test_steps_lead_from_old_to_new(pair: np.ndarray) -> None:
    old, new = pair[:, pair[0] != pair[1]]
    np.testing.assert_array_equal(symbols.apply_steps(old, symbols.steps_between(old, new)), new)


def test_neighbouring_numbers_are_one_step_apart() -> None:
    """e4m3fn codes in the order of their values: away from zero is step 0, towards and through it step 1."""
    rising = np.array([0x8A, 0x89, 0x81, 0x80, 0x00, 0x01, 0x02], np.uint8)
    assert symbols.steps_between(rising[[1, 3, 4, 5]], rising[[0, 2, 5, 6]]).tolist() == [0] * 4
    assert symbols.steps_between(rising[[0, 2, 3, 4, 5]], rising[[1, 3, 4, 3, 4]]).tolist() == [1] * 5
    assert symbols.steps_between(rising[[2, 5]], rising[[5, 2]]).tolist() == [5, 5]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 400), st.integers(1, 40))
def test_the_coder_returns_symbols_and_payload(seed: int, rows: int, count: int, lanes: int) -> None:
    rng = np.random.default_rng(seed)
    tables = models.quantize(rng.dirichlet(np.full(models.ALPHABET, 0.05), rows), 100)
    chosen = rng.integers(0, rows, count).astype(np.uint8)
    coded = rng.integers(0, 100, count).astype(np.uint8)
    payload = rng.bytes(lanes * rans.PAYLOAD_BYTES)
    data = rans.encode(coded, chosen, tables, lanes=lanes, payload=payload)
    found = rans.decode(data + b"rest", chosen, tables, lanes=lanes)
    np.testing.assert_array_equal(found.symbols, coded)
    assert (found.payload, found.size) == (payload, len(data))


def test_the_coder_reaches_the_entropy_of_its_tables() -> None:
    rng = np.random.default_rng(0)
    table = models.geometric(1 << 20, 50_000)[None]
    coded = rng.choice(models.ALPHABET, 20_000, p=table[0] / rans.TOTAL).astype(np.uint8)
    ideal = models.cost(np.bincount(coded, minlength=models.ALPHABET), table[0]) / 8
    lanes = 64
    payload = bytes(lanes * rans.PAYLOAD_BYTES)
    size = len(rans.encode(coded, np.zeros_like(coded), table, lanes=lanes, payload=payload)) - len(payload)
    assert ideal - 4 * lanes < size < 1.002 * ideal + 2 * lanes


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), DTYPES, st.integers(1, 2000), st.integers(0, classes.ALL_CLASSES))
def test_ranks_count_earlier_members_and_positions_invert_them(
    seed: int, dtype: type, size: int, mask: int
) -> None:
    """Oracle: counting one by one."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, np.iinfo(dtype).max, size, endpoint=True).astype(dtype)
    start = classes.exponents_start(old)
    merged = classes.merged_classes(classes.fine_classes(old, start), mask)
    boundaries = classes.used_boundaries(mask, old.dtype.itemsize, start)
    directory = Directory.of(old, boundaries)
    number = len(boundaries) + 1
    assert directory.sizes.tolist() == np.bincount(merged, minlength=number).tolist()
    chosen = rng.random(size) < rng.choice([0.01, 0.3, 1.0])
    for k in range(number):
        members = np.flatnonzero((merged == k) & chosen)
        ranks = directory.ranks(k, members)
        assert ranks.tolist() == [int((merged[:p] == k).sum()) for p in members]
        np.testing.assert_array_equal(directory.positions(k, ranks), members)


@given(st.integers(1, 1 << 40), st.data())
def test_gap_tables_are_the_geometric_distribution(count: int, data: st.DataObject) -> None:
    changed = data.draw(st.integers(1, count))
    table = models.geometric(count, changed)
    size = symbols.alphabet_size(count - 1)
    assert table.sum() == rans.TOTAL
    assert (table[:size] > 0).all() and not table[size:].any()
    for place in range(min(size, 16)):
        exact = (
            changed / count * math.exp(place * math.log1p(-changed / count))
            if changed < count
            else float(place == 0)
        )
        floor = 1 if place != int(np.argmax(table)) else rans.TOTAL
        assert abs(table[place] - exact * (rans.TOTAL - size)) <= floor + 1e-6


def test_step_tables_are_complete_and_explicit_ones_follow_their_histogram() -> None:
    for bits in (8, 16, 32):
        families = models.step_families(bits)
        size = symbols.alphabet_size((1 << bits) - 1)
        assert len(families) < models.EXPLICIT
        assert (families.sum(axis=1) == rans.TOTAL).all()
        assert (families[:, :size] > 0).all() and not families[:, size:].any()
    histogram = np.zeros(models.ALPHABET, np.int64)
    histogram[[0, 1, 7, 30]] = 80_000, 10_000, 9_999, 1
    described = models.describe(histogram)
    table = models.read_explicit(described[1:], 36)
    assert described[0] == len(described) - 1 == 31
    assert table[[0, 1, 7]] / rans.TOTAL == pytest.approx([0.8, 0.1, 0.1], rel=0.05)
    assert (table[:36] > 0).all() and not table[36:].any() and table.sum() == rans.TOTAL
