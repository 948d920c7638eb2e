"""A digest that each shard computes apart: the sum modulo 2**64 of mix(flat index, value bits).

Because it is a sum, rectangles of a tensor add up to the tensor on every mesh, and a sparse change
updates it. Any change of one element changes it for certain (mix is injective in the value); other
differences escape with probability about 2**-64. It guards against faults, not against forgery: pieces carry
a cryptographic hash besides (BLAKE3, in the manifest).
"""

from __future__ import annotations

import numpy as np

MODULUS = 1 << 64

# Odd constants: the golden ratio, and those of the splitmix64 finaliser (Steele, Lea, Flood 2014, variant 13
# of D. Stafford).
_INDEX_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_VALUE_FACTOR = np.uint64(0xD1342543DE82EF95)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_CHUNK = 1 << 15
_RAMP = np.arange(_CHUNK, dtype=np.uint64) * _INDEX_FACTOR


def digest(bits: np.ndarray, *, start: int = 0) -> int:
    """Digest of unsigned integers with consecutive flat indices from `start`, row-major."""
    flat = _unsigned(bits).reshape(-1)
    count = min(_CHUNK, flat.size)
    values, shifted = np.empty((2, count), np.uint64)  # once: threads wait for each other to get memory
    total = 0
    for begin in range(0, flat.size, _CHUNK):
        here = slice(0, min(_CHUNK, flat.size - begin))
        np.multiply(flat[begin : begin + _CHUNK], _VALUE_FACTOR, out=values[here], dtype=np.uint64)
        values[here] += _RAMP[here]
        values[here] += np.uint64((start + begin) * int(_INDEX_FACTOR) % MODULUS)
        total += int(_finalise(values[here], shifted[here]).sum(dtype=np.uint64))
    return total % MODULUS


def digest_rectangle(bits: np.ndarray, *, origin: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The part that the rectangle `bits` at `origin` has in the digest of a tensor of `shape`.

    Raises ValueError when the rectangle does not lie inside the tensor.
    """
    bits = _unsigned(bits)
    inside = len(origin) == len(shape) == bits.ndim and all(
        o >= 0 and o + n <= s for o, n, s in zip(origin, bits.shape, shape, strict=True)
    )
    if not inside:
        raise ValueError(
            f"a rectangle {list(bits.shape)} at {list(origin)} does not lie inside a tensor {list(shape)}"
        )
    if bits.size == 0:
        return 0
    # Trailing axes covered whole, and the last partial one, are one contiguous run.
    run_axis = bits.ndim
    while run_axis > 0 and (run_axis == bits.ndim or bits.shape[run_axis] == shape[run_axis]):
        run_axis -= 1
    strides = [int(np.prod(shape[axis + 1 :], dtype=object)) for axis in range(len(shape))]
    base = sum(o * s for o, s in zip(origin, strides, strict=True))
    runs = bits.reshape(*bits.shape[:run_axis], -1) if bits.ndim else bits.reshape(1)
    total = 0
    for outer in np.ndindex(*runs.shape[:-1]):
        total += digest(runs[outer], start=base + sum(i * s for i, s in zip(outer, strides, strict=False)))
    return total % MODULUS


def update(current: int, indices: np.ndarray, old_values: np.ndarray, new_values: np.ndarray) -> int:
    """The digest after the elements at flat `indices` (distinct) went from `old_values` to `new_values`."""
    indices = np.asarray(indices).reshape(-1).astype(np.uint64)
    old_flat, new_flat = _unsigned(old_values).reshape(-1), _unsigned(new_values).reshape(-1)
    if not indices.size == old_flat.size == new_flat.size:
        raise ValueError(
            f"an update has one old and one new value an index, found {indices.size} indices, "
            f"{old_flat.size} old and {new_flat.size} new values"
        )
    total = current
    for begin in range(0, indices.size, _CHUNK):
        part = slice(begin, begin + _CHUNK)
        keys = indices[part] * _INDEX_FACTOR
        after = _finalise(new_flat[part].astype(np.uint64) * _VALUE_FACTOR + keys)
        before = _finalise(old_flat[part].astype(np.uint64) * _VALUE_FACTOR + keys)
        total += int(after.sum(dtype=np.uint64)) - int(before.sum(dtype=np.uint64))
    return total % MODULUS


def updates(
    indices: np.ndarray, old_values: np.ndarray, new_values: np.ndarray, counts: np.ndarray
) -> list[int]:
    """How the digest of each of several tensors moves, in one pass: what `update` makes of 0.

    indices, old_values, new_values: as `update` takes them, tensor after tensor; counts int[tensors]: how
    many each has. Raises ValueError unless they add up.
    """
    if not indices.size == old_values.size == new_values.size == counts.sum():
        raise ValueError(
            f"found {indices.size} indices, {old_values.size} old and {new_values.size} new values for"
            f" {counts.sum()} changes in all; expected one each"
        )
    moves = np.empty(indices.size + 1, np.uint64)
    moves[-1] = 0  # so that a tensor past the last change has a place to start at
    for begin in range(0, indices.size, _CHUNK):
        part = slice(begin, min(begin + _CHUNK, indices.size))
        keys = indices[part].astype(np.uint64) * _INDEX_FACTOR
        after = _finalise(_unsigned(new_values[part]).astype(np.uint64) * _VALUE_FACTOR + keys)
        before = _finalise(_unsigned(old_values[part]).astype(np.uint64) * _VALUE_FACTOR + keys)
        np.subtract(after, before, out=moves[part])
    sums = np.add.reduceat(moves, np.cumsum(counts) - counts) if counts.size else moves[:0]
    return np.where(counts > 0, sums, np.uint64(0)).tolist()


def combine(*parts: int) -> int:
    """The digest of a tensor from the digests of parts that cover it once."""
    return sum(parts) % MODULUS


def _finalise(values: np.ndarray, shifted: np.ndarray | None = None) -> np.ndarray:
    """The splitmix64 finaliser, in place: a bijection of 64-bit words. shifted: memory of the same size."""
    shifted = np.right_shift(values, np.uint64(30), out=shifted)
    values ^= shifted
    values *= _FIRST
    np.right_shift(values, np.uint64(27), out=shifted)
    values ^= shifted
    values *= _SECOND
    np.right_shift(values, np.uint64(31), out=shifted)
    values ^= shifted
    return values


def _unsigned(bits: np.ndarray) -> np.ndarray:
    bits = np.asarray(bits)
    if bits.dtype.kind == "u":
        return bits
    if bits.dtype == np.float32:
        return np.ascontiguousarray(bits).view(np.uint32).reshape(bits.shape)
    raise ValueError(
        f"a digest is over bits (unsigned integers, or float32 by their bits), found {bits.dtype}"
    )
