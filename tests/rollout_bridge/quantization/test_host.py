"""Host quantisation against ml_dtypes' own rounding and the definition of the scale."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollout_bridge.quantization import host

FINITE_BITS = np.array([b for b in range(1 << 16) if b & 0x7FFF < 0x7F80], np.uint16)


def _values(bits: np.ndarray) -> np.ndarray:
    return bits.view(ml_dtypes.bfloat16).astype(np.float64)


@given(hnp.arrays(np.uint32, hnp.array_shapes(max_dims=3, max_side=9)))
def test_the_bfloat16_cast_is_that_of_ml_dtypes(bits: np.ndarray) -> None:
    x = bits.view(np.float32)
    ours = host.float32_to_bfloat16_bits(x).view(ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):
        theirs = x.astype(ml_dtypes.bfloat16)
    assert ours.shape == x.shape
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    finite = ~np.isnan(theirs)
    np.testing.assert_array_equal(ours.view(np.uint16)[finite], theirs.view(np.uint16)[finite])


@settings(deadline=None, max_examples=60)
@given(
    hnp.arrays(
        np.uint16, st.tuples(st.integers(1, 140), st.integers(1, 140)), elements=st.integers(0, 65023)
    ),
    st.integers(0, 254),
)
def test_codes_are_one_rounding_from_the_weight_and_scales_the_smallest(
    indices: np.ndarray, top: int
) -> None:
    """Oracle: float64 arithmetic and ml_dtypes' e4m3fn, over the whole range of BF16."""
    bits = FINITE_BITS[indices % len(FINITE_BITS)]
    bits = np.where((bits & 0x7FFF) >> 7 > top, bits & 0x807F, bits).astype(np.uint16)
    codes, scale = host.quantize_block_fp8(bits)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            block = np.s_[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]
            values, s = _values(bits[block]), float(scale[row, column])
            amax = np.abs(values).max()
            assert amax / s <= 448
            assert s == 1 if amax == 0 else (amax / (s / 2) > 448 or s == host.MINIMUM_SCALE)
            limit = 240 if s == host.MAXIMUM_SCALE else 448
            expected = (values / s).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
            expected = np.copysign(np.minimum(np.abs(expected), limit), values)
            found = codes[block].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(np.signbit(found), np.signbit(values))


@settings(deadline=None, max_examples=40)
@given(hnp.arrays(np.uint16, st.tuples(st.integers(1, 3), st.integers(1, 200))))
def test_dequantised_values_are_exact_and_quantise_to_themselves(raw: np.ndarray) -> None:
    bits = FINITE_BITS[raw % len(FINITE_BITS)]
    codes, scale = host.quantize_block_fp8(bits)
    back = host.dequantize_block_fp8(codes, scale)
    spread = np.repeat(scale.astype(np.float64), 128, axis=1)[0, : bits.shape[1]]
    np.testing.assert_array_equal(
        _values(back), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * spread
    )
    codes_again, scale_again = host.quantize_block_fp8(back)
    np.testing.assert_array_equal(host.dequantize_block_fp8(codes_again, scale_again), back)


def test_corners_worked_by_hand() -> None:
    """448 = code 0x7E at scale 1; 449 does not exist in BF16, 450 needs scale 2 and is 225 -> 224 = 0x76."""
    weights = np.array([[448.0, -0.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10]], np.float32)
    codes, scale = host.quantize_block_fp8(host.float32_to_bfloat16_bits(weights))
    assert scale.tolist() == [[1.0]]
    assert codes.tolist() == [
        [0x7E, 0x80, 0x01, 0x00, 0x02]
    ]  # ties to even: half a step down, one and a half up
    codes, scale = host.quantize_block_fp8(host.float32_to_bfloat16_bits(np.array([[450.0]], np.float32)))
    assert (scale.tolist(), codes.tolist()) == ([[2.0]], [[0x76]])
    codes, scale = host.quantize_block_fp8(np.array([[0x7F7F]], np.uint16))  # the largest BF16
    assert (scale[0, 0], codes[0, 0]) == (2.0**120, 0x77)
    assert host.dequantize_block_fp8(codes, scale)[0, 0] == 0x7F70  # 240 * 2**120, finite
    codes, scale = host.quantize_block_fp8(np.array([[0x807F, 0x0001]], np.uint16))  # subnormals
    assert (scale[0, 0], codes.tolist()) == (host.MINIMUM_SCALE, [[0x80, 0x00]])


def test_edge_blocks_are_partial_and_blocks_apart() -> None:
    weights = np.zeros((130, 257), np.float32)
    weights[129, 256] = 1.0
    weights[0, 0] = 896.0
    codes, scale = host.quantize_block_fp8(host.float32_to_bfloat16_bits(weights))
    assert scale.shape == host.scale_shape(weights.shape) == (2, 3)
    assert scale.tolist() == [[2.0, 1.0, 1.0], [1.0, 1.0, 2.0**-8]]
    assert np.flatnonzero(codes).tolist() == [0, codes.size - 1]


@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
def test_weights_that_are_not_finite_are_refused_by_name(bad: int) -> None:
    bits = np.zeros((3, 200), np.uint16)
    bits[1, 170] = bad
    with pytest.raises(host.NonFiniteError, match=r"layer\.q: 1 of 600 .* at \[1, 170\]"):
        host.quantize_block_fp8(bits, name="layer.q")


def test_what_is_not_a_quantised_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w: .*uint16\[out, in\].*float32\[2, 2\]"):
        host.quantize_block_fp8(np.zeros((2, 2), np.float32), name="w")
    codes = np.zeros((2, 200), np.uint8)
    with pytest.raises(ValueError, match=r"scales \[1, 1\]"):
        host.dequantize_block_fp8(codes, np.ones((1, 1), np.float32))
    for bad in (3.0, 0.0, -2.0, np.inf, np.nan, 2.0**-117, 2.0**121):
        with pytest.raises(ValueError, match="power of two"):
            host.dequantize_block_fp8(codes, np.array([[1.0, bad]], np.float32))


def test_an_empty_matrix_has_no_codes() -> None:
    codes, scale = host.quantize_block_fp8(np.zeros((0, 130), np.uint16))
    assert (codes.shape, scale.shape) == ((0, 130), (0, 2))
    assert host.dequantize_block_fp8(codes, scale).shape == (0, 130)
