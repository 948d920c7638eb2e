"""Block FP8 quantisation and change extraction on the accelerator: JAX twins of `host`, bit for bit.

Everything is integer arithmetic on the bits (no float division, conversion or comparison), so CPU, GPU and
TPU agree although they treat subnormals differently. The arrays are stacked, [..., out, in], and may be
sharded over mesh axes of type Auto; the functions are pure and meant to be called under `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from rollout_bridge.delta.classes import CLASSES
from rollout_bridge.quantization.host import BF16_INFINITY, MAXIMUM_SCALE_EXPONENT, MINIMUM_SCALE_EXPONENT
from rollout_bridge.quantization.plan import BLOCK

_WORD = 32
_SMALLEST_BUCKET = 1024
_EXPONENT_SHIFT = {8: 3, 16: 7}


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scale", "nonfinite"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Quantized:
    """codes u8[..., out, in]; scale f32[..., ceil(out/128), ceil(in/128)]; nonfinite int32[...].

    nonfinite: how many weights of each matrix are NaN or infinite in BF16. The codes of a matrix with any are
    meaningless, and the caller must not publish it.
    """

    codes: jax.Array
    scale: jax.Array
    nonfinite: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["count", "positions", "old", "new"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class CompactedChanges:
    """What differs between two arrays [..., out, in], compacted in ascending order of position.

    count int32: how many elements differ. When it is larger than `max_changes` the arrays below hold only the
    first ones, and the caller calls again with `change_bucket(count)`.
    positions int32[max_changes]: flat index into the whole array; old, new [max_changes]: bits before and
    after. Entries from `count` on are padding (zeros).
    """

    count: jax.Array
    positions: jax.Array
    old: jax.Array
    new: jax.Array


def float32_to_bfloat16_bits(x: jax.Array) -> jax.Array:
    """uint16 bits of x rounded to BF16 (nearest even); x is float32, or BF16 already. NaN stays NaN."""
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.uint16)
    if x.dtype != jnp.float32:
        raise ValueError(f"weights are float32 or bfloat16, found {x.dtype}{list(x.shape)}")
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    rounded = (bits + (((bits >> 16) & 1) + jnp.uint32(0x7FFF))) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return jnp.where(is_nan, (bits >> 16) | 0x40, rounded).astype(jnp.uint16)


def quantize_block_fp8(weights: jax.Array) -> Quantized:
    """Quantise weights [..., out, in] (float32, bfloat16, or BF16 bits as uint16); the rule is in `host`."""
    if weights.ndim < 2:
        raise ValueError(
            f"quantize_block_fp8 takes weights [..., out, in], found shape {list(weights.shape)}"
        )
    bits = weights if weights.dtype == jnp.uint16 else float32_to_bfloat16_bits(weights)
    magnitude = (bits & 0x7FFF).astype(jnp.int32)
    nonfinite = jnp.sum((magnitude >= BF16_INFINITY).astype(jnp.int32), axis=(-2, -1))
    exponent = _scale_exponent(_block_max(magnitude))
    exponents = _spread(exponent, weights.shape)

    # value / 2**e = (128 + mantissa) * 2**(power - 7); e4m3fn has 3 mantissa bits from power -6 up, fixed
    # point below.
    power = (magnitude >> 7) - 127 - exponents
    significand = 128 + (magnitude & 0x7F)
    normal = ((power + 7) << 7) | (magnitude & 0x7F)
    normal = (normal + 7 + ((normal >> 4) & 1)) >> 4
    shift = jnp.clip(-2 - power, 4, 10)
    fixed_point = (significand + (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift
    code = jnp.where(power >= -6, normal, fixed_point)
    code = jnp.minimum(code, jnp.where(exponents == MAXIMUM_SCALE_EXPONENT, 0x77, 0x7E))
    code = jnp.where(magnitude < 0x80, 0, code)
    code = code | ((bits >> 8) & 0x80).astype(jnp.int32)
    scale = lax.bitcast_convert_type(((exponent + 127) << 23).astype(jnp.uint32), jnp.float32)
    return Quantized(code.astype(jnp.uint8), scale, nonfinite)


def dequantize_block_fp8(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """BF16 bits u16[..., out, in] of codes u8[..., out, in] times the scale of their block; exact."""
    magnitude = (codes & 0x7F).astype(jnp.int32)
    exponents = _spread(
        (lax.bitcast_convert_type(scale, jnp.uint32) >> 23).astype(jnp.int32) - 127, codes.shape
    )
    field, mantissa = magnitude >> 3, magnitude & 7
    # A subnormal code m * 2**-9 is normal in BF16: its leading one moves to the implicit bit.
    top = (mantissa >= 2).astype(jnp.int32) + (mantissa >= 4).astype(jnp.int32)
    is_normal = field > 0
    power = jnp.where(is_normal, field - 7, top - 9) + exponents
    fraction = jnp.where(is_normal, mantissa << 4, (mantissa << (7 - top)) & 0x7F)
    bits = jnp.where(magnitude == 0, 0, ((power + 127) << 7) | fraction)
    bits = jnp.where(magnitude == 0x7F, 0x7FC0, bits)
    return (bits | ((codes & 0x80).astype(jnp.int32) << 8)).astype(jnp.uint16)


def change_bucket(count: int, size: int) -> int:
    """Static size for `count` changes of `size` elements: a power of two, so that few programs compile."""
    return max(1, min(size, max(_SMALLEST_BUCKET, 1 << (max(count, 1) - 1).bit_length())))


def diff_compact(codes: jax.Array, baseline: jax.Array, max_changes: int) -> CompactedChanges:
    """The changes from `baseline` to `codes` [..., out, in], in `max_changes` (static) slots.

    Temporary memory is a quarter of a byte an element. Call it on each shard of a sharded array: positions
    are of the array given. Raises ValueError past 2**31 - 1 elements: positions are int32.
    """
    if codes.shape != baseline.shape or codes.dtype != baseline.dtype:
        raise ValueError(
            f"diff_compact compares arrays of one shape and dtype, found {codes.dtype}{list(codes.shape)} "
            f"against a baseline of {baseline.dtype}{list(baseline.shape)}"
        )
    if codes.size >= 2**31:
        raise ValueError(f"{codes.size} elements are past int32 positions; pass the leading axis in parts")
    words, cumulative = _bit_index((codes != baseline).reshape(-1))
    count = cumulative[-1]
    rank = jnp.arange(max_changes, dtype=jnp.int32)
    word = jnp.minimum(jnp.searchsorted(cumulative, rank, side="right").astype(jnp.int32), words.size - 1)
    bits_before = cumulative[word] - lax.population_count(words[word]).astype(jnp.int32)
    positions = word * _WORD + _select_bit(words[word], rank - bits_before)
    valid = rank < count
    positions = jnp.where(valid, positions, 0)
    old = jnp.where(valid, baseline.reshape(-1)[positions], 0).astype(codes.dtype)
    new = jnp.where(valid, codes.reshape(-1)[positions], 0).astype(codes.dtype)
    return CompactedChanges(count, positions, old, new)


def class_ranks(baseline: jax.Array, positions: jax.Array, *, start: int = 0) -> tuple[jax.Array, jax.Array]:
    """What lets a host that has only the changes code them as small as one that has the whole baseline.

    baseline [..., out, in]; positions int32[n]: of `diff_compact`. Returns ranks int32[n], of each position
    among the elements of its class (by the exponent of the old value, from the exponent field `start`; 0 for
    FP8 codes, 112 suits BF16 weights) in the whole stack, and sizes int32[..., 16], the elements of each
    class in each matrix.
    """
    width = baseline.dtype.itemsize * 8
    exponents = (baseline & ((1 << (width - 1)) - 1)) >> _EXPONENT_SHIFT[width]
    classes = jnp.clip(exponents.astype(jnp.int32) - start, 0, CLASSES - 1).astype(jnp.uint8)
    class_of_position = classes.reshape(-1)[positions]
    word, bit = positions // _WORD, (positions % _WORD).astype(jnp.uint32)
    ranks = jnp.zeros_like(positions)
    sizes = []
    for number in range(CLASSES):
        member = classes == number
        words, cumulative = _bit_index(member.reshape(-1))
        from_bit = lax.population_count(words[word] >> bit).astype(jnp.int32)
        ranks = jnp.where(class_of_position == number, cumulative[word] - from_bit, ranks)
        sizes.append(jnp.sum(member.astype(jnp.int32), axis=(-2, -1)))
    return ranks, jnp.stack(sizes, axis=-1)


def _bit_index(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """uint32 words of a flat mask, least significant bit first; set bits up to and including each word."""
    padded = jnp.pad(mask, (0, -mask.size % _WORD) if mask.size else (0, _WORD)).reshape(-1, _WORD)
    words = jnp.sum(
        padded.astype(jnp.uint32) << jnp.arange(_WORD, dtype=jnp.uint32), axis=1, dtype=jnp.uint32
    )
    return words, jnp.cumsum(lax.population_count(words).astype(jnp.int32))


def _select_bit(words: jax.Array, rank: jax.Array) -> jax.Array:
    """Position of set bit number `rank` (from 0) of each word, by halving."""
    position = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        low = lax.population_count(
            (words >> position.astype(jnp.uint32)) & jnp.uint32((1 << width) - 1)
        ).astype(jnp.int32)
        above = rank >= low
        rank = jnp.where(above, rank - low, rank)
        position = jnp.where(above, position + width, position)
    return jnp.minimum(position, _WORD - 1)


def _scale_exponent(amax_bits: jax.Array) -> jax.Array:
    exponent = (amax_bits >> 7) - 127 - 8 + ((amax_bits & 0x7F) > 0x60)
    exponent = jnp.clip(exponent, MINIMUM_SCALE_EXPONENT, MAXIMUM_SCALE_EXPONENT)
    return jnp.where(amax_bits == 0, 0, exponent)


def _block_max(magnitude: jax.Array) -> jax.Array:
    """Largest of each block of [..., out, in], edge blocks partial: [..., ceil(out/128), ceil(in/128)]."""
    *leading, out, width = magnitude.shape
    pad = ((0, 0),) * len(leading) + ((0, -out % BLOCK[0]), (0, -width % BLOCK[1]))
    padded = jnp.pad(magnitude, pad) if out % BLOCK[0] or width % BLOCK[1] else magnitude
    blocks = padded.reshape(
        *leading, padded.shape[-2] // BLOCK[0], BLOCK[0], padded.shape[-1] // BLOCK[1], BLOCK[1]
    )
    return jnp.max(blocks, axis=(-3, -1))


def _spread(per_block: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    rows = jnp.repeat(per_block, BLOCK[0], axis=-2)[..., : shape[-2], :]
    return jnp.repeat(rows, BLOCK[1], axis=-1)[..., : shape[-1]]
