"""The digest: against its definition in Python integers, by parts, and updated in place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollout_bridge.quantization import digest as d

MASK = (1 << 64) - 1
ARRAYS = st.sampled_from([np.uint8, np.uint16, np.uint32]).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9))
)


def _by_definition(values: list[int]) -> int:
    total = 0
    for index, value in enumerate(values):
        z = (index * 0x9E3779B97F4A7C15 + value * 0xD1342543DE82EF95) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        total += z ^ (z >> 31)
    return total & MASK


@given(ARRAYS)
def test_it_is_its_definition(bits: np.ndarray) -> None:
    assert d.digest(bits) == _by_definition([int(v) for v in bits.reshape(-1)])


def test_chunks_of_a_long_array_join() -> None:
    bits = np.random.default_rng(0).integers(0, 256, 100_003).astype(np.uint8)
    whole = d.digest(bits)
    assert whole == _by_definition(bits.tolist())
    assert whole == d.combine(d.digest(bits[:70_000]), d.digest(bits[70_000:], start=70_000))
    assert whole == d.digest(bits.reshape(-1, 1)[:, ::1])


@settings(deadline=None)
@given(
    hnp.arrays(np.uint16, st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(1, 7))),
    st.tuples(*[st.integers(0, 7)] * 3),
)
def test_rectangles_that_tile_a_tensor_add_up_to_it(bits: np.ndarray, cuts: tuple[int, int, int]) -> None:
    spans = [((0, min(c, n)), (min(c, n), n)) for c, n in zip(cuts, bits.shape, strict=True)]
    parts = [
        d.digest_rectangle(bits[a0:a1, b0:b1, c0:c1], origin=(a0, b0, c0), shape=bits.shape)
        for a0, a1 in spans[0]
        for b0, b1 in spans[1]
        for c0, c1 in spans[2]
    ]
    assert d.combine(*parts) == d.digest(bits)


@given(ARRAYS, st.data())
def test_an_update_gives_the_digest_of_the_result(old: np.ndarray, data: st.DataObject) -> None:
    new = data.draw(hnp.arrays(old.dtype, old.shape))
    indices = np.flatnonzero(old.reshape(-1) != new.reshape(-1))
    before, after = old.reshape(-1)[indices], new.reshape(-1)[indices]
    assert d.update(d.digest(old), indices, before, after) == d.digest(new)


@given(st.lists(st.integers(0, 5), max_size=6), st.sampled_from([np.uint8, np.uint32]), st.integers(0, 99))
def test_updates_of_several_tensors_are_those_of_each(counts: list[int], dtype: type, seed: int) -> None:
    random = np.random.default_rng(seed)
    total = sum(counts)
    indices = np.concatenate([np.sort(random.permutation(100)[:count]) for count in [*counts, 0]])
    old, new = random.integers(0, 200, (2, total)).astype(dtype)
    each = np.split(np.arange(total), np.cumsum(counts)[:-1]) if counts else []
    expected = [d.update(0, indices[part], old[part], new[part]) for part in each]
    assert d.updates(indices, old, new, np.array(counts, np.int64)) == expected
    with pytest.raises(ValueError, match="changes in all"):
        d.updates(indices, old, new, np.array([*counts, 1]))


def test_every_change_of_one_element_and_every_swap_is_seen() -> None:
    bits = np.arange(40, dtype=np.uint8)
    seen = {d.digest(bits)}
    for place in range(40):
        for value in range(256):
            if value != place:
                other = bits.copy()
                other[place] = value
                seen.add(d.digest(other))
    assert len(seen) == 1 + 40 * 255
    swapped = bits.copy()
    swapped[[3, 9]] = swapped[[9, 3]]
    assert d.digest(swapped) not in seen


def test_float32_is_digested_by_its_bits() -> None:
    values = np.array([[1.0, -0.0], [np.nan, 2.5]], np.float32)
    assert d.digest(values) == d.digest(values.view(np.uint32))
    with pytest.raises(ValueError, match="int64"):
        d.digest(np.arange(3))


def test_mismatched_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rectangle \[2, 2\] at \[0, 3\] .* \[2, 4\]"):
        d.digest_rectangle(np.zeros((2, 2), np.uint8), origin=(0, 3), shape=(2, 4))
    with pytest.raises(ValueError, match="2 indices, 1 old and 2 new"):
        d.update(0, np.arange(2), np.zeros(1, np.uint8), np.zeros(2, np.uint8))
