"""The form for many changes: bytes that zstandard codes with Huffman tables, an order quicker than rANS.

A change is a byte, the low half the gap to the change before it in its class (without its last `shift`
bits), the high half its value step, each 15 where it does not fit. The last bits of gaps are sent as they
are: of changes strewn at random they are independent of the rest and all values of them about as frequent.
Layout: [`places` header] then for each class a varint, how many of its elements change, and if any do: shift,
a byte; the last bits of all gaps, one bit of all changes after another, ceil(changes / 8) bytes each; then
planes: the halves; what steps pass 15 by; what gaps do. Of the last two, bytes from 255 on are 255 and follow
as a plane of 8-byte integers. A plane is its compressed length as a varint and a zstandard frame; a reader
knows beforehand how many bytes it holds.
"""

from __future__ import annotations

import numpy as np
import zstandard

from rollout_bridge.delta import places, symbols
from rollout_bridge.delta.blob import DeltaError, Reader, inflate, varint

_HALF = 15
_BYTE = 255
_MOST_SHIFT = 40
# Few matches are looked for: the gain is in the Huffman tables, of which each 128 KiB has its own.
_COMPRESSION = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=8, min_match=7, write_content_size=1
)


def encode(changes: places.ClassChanges) -> tuple[int, bytes]:
    """(flags, body) of `changes`."""
    steps, gaps = changes.steps, changes.gaps()
    out = [changes.header(steps.dtype.itemsize)]
    compressor = zstandard.ZstdCompressor(compression_params=_COMPRESSION)
    firsts = np.concatenate([[0], np.cumsum(changes.moved)])
    for number, (size, moved) in enumerate(zip(changes.sizes.tolist(), changes.moved.tolist(), strict=True)):
        out.append(varint(moved))
        if not moved:
            continue
        here = slice(firsts[number], firsts[number + 1])
        shift = _shift(size, moved)
        out += [bytes([shift]), *_last_bits(gaps[here], shift)]
        for plane in _planes(gaps[here], steps[here], shift):
            blob = compressor.compress(plane)
            out += [varint(len(blob)), blob]
    return (places.FLAG_PARTITION if changes.mask else 0), b"".join(out)


def decode(flags: int, body: bytes, old: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(ascending indices int64, new values) of each class of an `encode` body for the flat array `old`.

    DeltaError on any damage.
    """
    if flags & ~places.FLAG_PARTITION:
        raise DeltaError(f"flags {flags:#x} are not of this version of the codec; upgrade the reader")
    reader = Reader(body)
    directory = places.read_directory(reader, old, partitioned=bool(flags & places.FLAG_PARTITION))
    moved: list[int] = []
    gaps: list[np.ndarray] = []
    steps: list[np.ndarray] = []
    for size in directory.sizes.tolist():
        moved.append(reader.varint())
        if moved[-1] > size:
            raise DeltaError(
                f"{moved[-1]} elements change in a class of {size}; the blob is of another array, or damaged"
            )
        found = _read_planes(reader, moved[-1], old.dtype) if moved[-1] else _NOTHING
        gaps.append(found[0])
        steps.append(found[1])
    reader.end()
    indices = places.find(directory, gaps)
    values = [
        symbols.apply_steps(old[part], step.astype(old.dtype))
        for part, step in zip(indices, steps, strict=True)
    ]
    return indices, values


_NOTHING = (np.empty(0, np.int64), np.empty(0, np.uint8))


def _shift(size: int, moved: int) -> int:
    """Last bits to split from gaps, such that the mean of the rest is between 1.5 and 3."""
    mean = (size - moved) / moved
    return min(_MOST_SHIFT, max(0, int(mean / 1.5).bit_length() - 1))


def _last_bits(gaps: np.ndarray, shift: int) -> list[bytes]:
    """The last `shift` bits of gaps, bit by bit."""
    pieces = []
    for begin in range(0, shift, 8):
        octets = (gaps >> begin).astype(np.uint8) if begin else gaps.astype(np.uint8)
        for bit in range(min(8, shift - begin)):
            pieces.append(np.packbits(octets & np.uint8(1 << bit), bitorder="little").tobytes())
    return pieces


def _read_last_bits(reader: Reader, count: int, shift: int) -> list[np.ndarray]:
    """Bytes uint8[count] of `_last_bits`, the lowest first."""
    found = []
    for begin in range(0, shift, 8):
        octets = np.zeros(count, np.uint8)
        for bit in range(min(8, shift - begin)):
            packed = np.frombuffer(reader.take(-(-count // 8)), np.uint8)
            octets |= np.unpackbits(packed, count=count, bitorder="little") << np.uint8(bit)
        found.append(octets)
    return found


def _planes(gaps: np.ndarray, steps: np.ndarray, shift: int) -> list[bytes]:
    high = gaps >> shift if shift else gaps
    low_half = np.minimum(high, _HALF).astype(np.uint8)
    high_half = np.minimum(steps, steps.dtype.type(_HALF)).astype(np.uint8)
    planes = [(low_half | high_half << np.uint8(4)).tobytes()]
    for values, half in ((steps, high_half), (high, low_half)):
        planes += _overflow(values[np.flatnonzero(half == _HALF)])
    return planes


def _overflow(values: np.ndarray) -> list[bytes]:
    """Planes of the integers from 15 on."""
    if not values.size:
        return []
    rest = values.astype(np.int64) - _HALF
    large = rest[rest >= _BYTE]
    planes = [np.minimum(rest, _BYTE).astype(np.uint8).tobytes()]
    return planes + ([large.astype("<i8").tobytes()] if large.size else [])


def _read_planes(reader: Reader, count: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """(gaps int64, steps) of `count` changes."""
    shift = reader.byte()
    if shift > _MOST_SHIFT:
        raise DeltaError(
            f"gaps are split at bit {shift}, at most {_MOST_SHIFT} is possible; the blob is damaged"
        )
    last = _read_last_bits(reader, count, shift)
    halves = _read_plane(reader, count)
    steps = _read_overflow(reader, halves >> np.uint8(4), (1 << 8 * dtype.itemsize) - 1)
    gaps = _read_overflow(reader, halves & np.uint8(_HALF), (1 << 62) >> shift).astype(np.int64)
    if shift:
        gaps <<= shift
    for place, octets in enumerate(last):
        gaps |= octets.astype(np.int64) << (8 * place) if place else octets
    return gaps, steps


def _read_overflow(reader: Reader, halves: np.ndarray, largest: int) -> np.ndarray:
    """The integers whose first 15 values are `halves` uint8, the others read from planes."""
    passed = np.flatnonzero(halves == _HALF)
    if not passed.size:
        return halves
    rest = _read_plane(reader, passed.size).astype(np.int64)
    large = np.flatnonzero(rest == _BYTE)
    if large.size:
        rest[large] = np.frombuffer(_read_plane(reader, 8 * large.size).tobytes(), "<i8")
        if rest.min() < 0 or rest.max() > largest - _HALF:
            raise DeltaError("a decoded step or gap is out of range; the blob is damaged")
    elif rest.max() > largest - _HALF:
        raise DeltaError("a decoded step or gap is out of range; the blob is damaged")
    values = halves.astype(np.int64)
    values[passed] = rest + _HALF
    return values


def _read_plane(reader: Reader, size: int) -> np.ndarray:
    return np.frombuffer(inflate(reader.take(reader.varint()), size), np.uint8)
