"""Block FP8 quantisation on the host: numpy, bit-identical to `device`.

A weight is cast to BF16 (round to nearest even), each 128x128 block (edge blocks may be partial) takes the
smallest power-of-two scale s with amax / s <= 448, and weight / s is rounded to nearest even e4m3fn. Dividing
by a power of two is exact, so a code is one rounding away from the BF16 weight and code * s is exactly a BF16
number.

Three corners keep that true over the whole BF16 range:
- s is at least MINIMUM_SCALE, so that no quotient and no dequantised value is subnormal (accelerators flush
  those); BF16 subnormals become signed zeros;
- in a block whose s is MAXIMUM_SCALE the largest code is 240, because 256 * 2**120 is past the largest BF16;
- a block of zeros has s = 1. The sign of a zero is kept.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from rollout_bridge.errors import ExpectedError
from rollout_bridge.quantization.plan import BLOCK

LARGEST_CODE_VALUE = 448.0
MINIMUM_SCALE_EXPONENT = -116
MAXIMUM_SCALE_EXPONENT = 120
MINIMUM_SCALE = 2.0**MINIMUM_SCALE_EXPONENT
MAXIMUM_SCALE = 2.0**MAXIMUM_SCALE_EXPONENT

_CODE_OF_240 = 0x77
BF16_INFINITY = 0x7F80
_BF16_SMALLEST_NORMAL = 0x0080
# e4m3fn code of every non-negative BF16 number, by its bits; past 448 it is never read.
_CODE_OF_BF16 = (
    np.arange(BF16_INFINITY, dtype=np.uint16)
    .view(ml_dtypes.bfloat16)
    .astype(np.float32)
    .clip(max=LARGEST_CODE_VALUE)
    .astype(ml_dtypes.float8_e4m3fn)
    .view(np.uint8)
)
VALUE_OF_CODE = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


class NonFiniteError(ExpectedError, ValueError):
    """A weight to quantise is NaN or infinite."""


def float32_to_bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """Round float32 to BF16, to nearest even; any shape, uint16 bits out.

    NaN stays NaN (made quiet, sign kept); what is past the largest BF16 becomes infinity, as in IEEE 754.
    """
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16).reshape(np.shape(x))


def bfloat16_bits_to_float32(bits: np.ndarray) -> np.ndarray:
    """The float32 values of BF16 bits (exact); any shape."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def scale_shape(shape: tuple[int, ...], block: tuple[int, int] = BLOCK) -> tuple[int, ...]:
    """Shape of the scales of a weight of `shape` [..., out, in]."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def quantize_block_fp8(x_bf16_bits: np.ndarray, *, name: str = "tensor") -> tuple[np.ndarray, np.ndarray]:
    """Quantise BF16 bits u16[out, in] to (e4m3fn codes u8[out, in], scales f32[ceil(out/128), ceil(in/128)]).

    Raises NonFiniteError naming `name` and the first bad element, ValueError when the input is not a 2-D
    uint16 array.
    """
    bits = np.asarray(x_bf16_bits)
    if bits.ndim != 2 or bits.dtype != np.uint16:
        raise ValueError(
            f"{name}: quantize_block_fp8 takes the BF16 bits of a matrix (uint16[out, in]), found "
            f"{bits.dtype}{list(bits.shape)}; cast with float32_to_bfloat16_bits"
        )
    magnitude = bits & 0x7FFF
    if bits.size == 0:
        return bits.astype(np.uint8), np.ones(scale_shape(bits.shape), np.float32)
    block_amax = np.maximum.reduceat(magnitude, np.arange(0, bits.shape[0], BLOCK[0]), axis=0)
    block_amax = np.maximum.reduceat(block_amax, np.arange(0, bits.shape[1], BLOCK[1]), axis=1)
    if (block_amax >= BF16_INFINITY).any():
        raise NonFiniteError(_describe_non_finite(bits, name))

    exponent = _scale_exponent(block_amax)
    # A BF16 number divided by 2**e has e less in its exponent field, bits 7 and up.
    quotient = magnitude.astype(np.int32) - _spread(exponent << 7, bits.shape)
    quotient[magnitude < _BF16_SMALLEST_NORMAL] = 0
    codes = _CODE_OF_BF16[np.maximum(quotient, 0)]
    if (exponent == MAXIMUM_SCALE_EXPONENT).any():
        largest = np.where(exponent == MAXIMUM_SCALE_EXPONENT, _CODE_OF_240, 0x7E).astype(np.uint8)
        codes = np.minimum(codes, _spread(largest, bits.shape))
    codes |= ((bits >> 8) & 0x80).astype(np.uint8)
    return codes, np.ldexp(np.float32(1), exponent).astype(np.float32)


def dequantize_block_fp8(codes: np.ndarray, scale: np.ndarray, *, name: str = "tensor") -> np.ndarray:
    """BF16 bits u16[out, in] of codes u8[out, in] times their block's power-of-two scale; exact.

    Raises ValueError when the scales have another shape, or are not powers of two between MINIMUM_SCALE and
    MAXIMUM_SCALE (the product would then not be a BF16 number).
    """
    codes, scale = np.asarray(codes), np.asarray(scale, dtype=np.float32)
    if codes.ndim != 2 or codes.dtype != np.uint8 or scale.shape != scale_shape(codes.shape):
        raise ValueError(
            f"{name}: found codes {codes.dtype}{list(codes.shape)} with scales {list(scale.shape)}; expected "
            f"uint8[out, in] with scales [ceil(out/{BLOCK[0]}), ceil(in/{BLOCK[1]})]"
        )
    mantissa, exponent = np.frexp(scale)
    if codes.size == 0:
        return codes.astype(np.uint16)
    if (mantissa != 0.5).any() or (scale < MINIMUM_SCALE).any() or (scale > MAXIMUM_SCALE).any():
        bad = scale[(mantissa != 0.5) | (scale < MINIMUM_SCALE) | (scale > MAXIMUM_SCALE)].flat[0]
        raise ValueError(
            f"{name}: scale {bad!r} is not a power of two in [2**{MINIMUM_SCALE_EXPONENT}, "
            f"2**{MAXIMUM_SCALE_EXPONENT}]; this checkpoint was not quantised by rollout_bridge.quantization"
        )
    values = VALUE_OF_CODE[codes]
    values *= _spread(scale, codes.shape)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _scale_exponent(amax_bits: np.ndarray) -> np.ndarray:
    """Smallest e with amax / 2**e <= 448 = 1.75 * 2**8, within the limits above; 0 for a block of zeros."""
    amax_bits = amax_bits.astype(np.int32)
    exponent = (amax_bits >> 7) - 127 - 8 + ((amax_bits & 0x7F) > 0x60)
    exponent = np.maximum(exponent, MINIMUM_SCALE_EXPONENT)
    return np.where(amax_bits == 0, 0, exponent)


def _spread(per_block: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Repeat one value a block over the elements of the block."""
    rows = np.repeat(per_block, BLOCK[0], axis=0)[: shape[0]]
    return np.repeat(rows, BLOCK[1], axis=1)[:, : shape[1]]


def _describe_non_finite(bits: np.ndarray, name: str) -> str:
    bad = np.argwhere((bits & 0x7FFF) >= BF16_INFINITY)
    row, column = bad[0]
    value = bfloat16_bits_to_float32(bits[row, column : column + 1])[0]
    return (
        f"{name}: {len(bad)} of {bits.size} weights are not finite in BF16, the first is {value} at "
        f"[{row}, {column}]; publish the last finite weights, or restore an earlier checkpoint"
    )
