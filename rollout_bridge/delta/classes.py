"""Elements grouped by the magnitude of their old value, and positions as ranks inside a group.

How likely an element is to change depends on how far apart representable numbers are around it, that is, on
the exponent of its old value, which the decoder knows. Elements are therefore split into up to 16 classes
by exponent, neighbouring classes merged where telling them apart costs more than it gains, and a position
is coded as its rank among the elements of its class. A partition is a 15-bit mask over the boundaries
between the classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

CLASSES = 16
_EXPONENT_SHIFT = {1: 3, 2: 7, 4: 23}  # of e4m3, BF16 and F32 patterns, by bytes
_CHUNK = 1 << 20
_SAMPLE = 1 << 18


@dataclasses.dataclass(frozen=True)
class ClassRanks:
    """Where changed elements stand in their classes, for a writer that has this but not the old array.

    ranks int64: of each changed element among the elements of its class; sizes int64[16]: elements of each
    class; `start`: the exponent field at which classes start (0 for FP8 codes).
    `quantization.device.class_ranks` computes them on an accelerator.
    """

    ranks: np.ndarray
    sizes: np.ndarray
    start: int = 0


def magnitudes(values: np.ndarray) -> np.ndarray:
    """Bit patterns without their sign."""
    return values & values.dtype.type((1 << (values.dtype.itemsize * 8 - 1)) - 1)


def exponents_start(old: np.ndarray) -> int:
    """The exponent field at which classes start, such that the last class holds the largest old value."""
    if old.dtype.itemsize == 1 or old.size == 0:
        return 0
    largest = max(int(magnitudes(old[begin : begin + _CHUNK]).max()) for begin in range(0, old.size, _CHUNK))
    return max(0, (largest >> _EXPONENT_SHIFT[old.dtype.itemsize]) - (CLASSES - 1))


def boundary_values(itemsize: int, start: int) -> np.ndarray:
    """Smallest magnitude int64 of each class but the first; the exponent fields count from `start`."""
    return (start + np.arange(1, CLASSES, dtype=np.int64)) << _EXPONENT_SHIFT[itemsize]


def fine_classes(values: np.ndarray, start: int) -> np.ndarray:
    """Class (before merging) int64 of each old value."""
    exponents = (magnitudes(values) >> values.dtype.type(_EXPONENT_SHIFT[values.dtype.itemsize])).astype(
        np.int64
    )
    return np.clip(exponents - start, 0, CLASSES - 1)


def estimate_counts(old: np.ndarray, start: int, changed: np.ndarray) -> np.ndarray:
    """About how many elements each fine class holds, from a regular sample; never fewer than `changed` of
    them.
    """
    stride = max(1, old.size // _SAMPLE)
    counts = np.bincount(fine_classes(old[::stride], start), minlength=CLASSES) * stride
    return np.maximum(counts, changed)


def choose_partition(
    counts: np.ndarray, changed: np.ndarray, value_bits: np.ndarray, class_bits: float
) -> int:
    """The mask that codes positions and values in the fewest bits.

    counts, changed [16]: elements and changed elements of each fine class; value_bits [16, 16]: bits of the
    values of classes i..j under one model; class_bits: what describing one more class costs.
    """
    total = np.concatenate([[0], np.cumsum(counts)])
    moved = np.concatenate([[0], np.cumsum(changed)])
    best = [0.0] + [np.inf] * CLASSES
    came_from = [0] * (CLASSES + 1)
    for end in range(1, CLASSES + 1):
        n = (total[end] - total[:end]).astype(np.float64)
        m = (moved[end] - moved[:end]).astype(np.float64)
        positions = m * np.log2(np.maximum(n, 1) / np.maximum(m, 1))
        positions += (n - m) * np.log2(np.maximum(n, 1) / np.maximum(n - m, 1))
        costs = np.array(best[:end]) + positions + value_bits[:end, end - 1] + class_bits
        came_from[end] = int(np.argmin(costs))
        best[end] = float(costs[came_from[end]])
    mask, end = 0, CLASSES
    while came_from[end] > 0:
        end = came_from[end]
        mask |= 1 << (end - 1)
    return mask


ALL_CLASSES = (1 << (CLASSES - 1)) - 1  # the partition that merges none


def used_boundaries(mask: int, itemsize: int, start: int) -> np.ndarray:
    """Magnitudes that separate the classes of partition `mask`."""
    chosen = [j for j in range(CLASSES - 1) if mask >> j & 1]
    return boundary_values(itemsize, start)[chosen]


def merged_classes(fine: np.ndarray, mask: int) -> np.ndarray:
    """Class in the partition of each fine class number."""
    lookup = np.cumsum([0, *((mask >> j) & 1 for j in range(CLASSES - 1))])
    return lookup[fine]


def count_classes(old: np.ndarray, boundaries: np.ndarray) -> np.ndarray:
    """int64[chunks, classes]: elements of each class in each run of 2**20 elements of flat `old`."""
    rows = []
    for begin in range(0, old.size, _CHUNK):
        part = magnitudes(old[begin : begin + _CHUNK])
        below = [int(np.count_nonzero(part < part.dtype.type(b))) for b in boundaries]
        rows.append(np.diff([0, *below, part.size]))
    return np.array(rows, np.int64).reshape(-1, len(boundaries) + 1)


def ranks(
    old: np.ndarray, boundaries: np.ndarray, counts: np.ndarray, class_indices: list[np.ndarray]
) -> list[np.ndarray]:
    """Rank int64, among the elements of their class, of the ascending flat `class_indices` of each class.

    counts: `count_classes` of the same flat `old`.
    """
    if not len(boundaries):
        return class_indices
    chunk_starts = np.arange(0, old.size + _CHUNK, _CHUNK)
    edges = [np.searchsorted(indices, chunk_starts) for indices in class_indices]
    before = np.cumsum(counts, axis=0) - counts
    out = [np.empty(indices.size, np.int64) for indices in class_indices]
    for chunk, begin in enumerate(range(0, old.size, _CHUNK)):
        for k, words in enumerate(_class_words(old[begin : begin + _CHUNK], boundaries)):
            inside = slice(edges[k][chunk], edges[k][chunk + 1])
            if inside.start < inside.stop:
                rank = _bits_before(words, class_indices[k][inside] - begin)
                np.add(rank, before[chunk, k], out=out[k][inside])
    return out


def positions(
    old: np.ndarray, boundaries: np.ndarray, counts: np.ndarray, class_ranks: list[np.ndarray]
) -> list[np.ndarray]:
    """Flat position int64 of each of the ascending `class_ranks` of each class; the inverse of `ranks`.

    Every rank is below the size of its class.
    """
    if not len(boundaries):
        return class_ranks
    ends = np.cumsum(counts, axis=0)
    edges = [np.searchsorted(r, np.concatenate([[0], e])) for r, e in zip(class_ranks, ends.T, strict=True)]
    out = [np.empty(r.size, np.int64) for r in class_ranks]
    for chunk, begin in enumerate(range(0, old.size, _CHUNK)):
        for k, words in enumerate(_class_words(old[begin : begin + _CHUNK], boundaries)):
            inside = slice(edges[k][chunk], edges[k][chunk + 1])
            if inside.start < inside.stop:
                local = class_ranks[k][inside] - (ends[chunk, k] - counts[chunk, k])
                np.add(_select(words, local), begin, out=out[k][inside])
    return out


def _class_words(part: np.ndarray, boundaries: np.ndarray) -> Iterator[np.ndarray]:
    """For each class its members as uint64 words, bit i of word w being element 64 w + i."""
    magnitude = magnitudes(part)
    below = np.zeros(-(-part.size // 64), "<u8")
    for boundary in boundaries:
        upper = _packed(magnitude < magnitude.dtype.type(boundary))
        yield upper & ~below
        below = upper
    yield _packed(np.ones(part.size, bool)) & ~below


def _packed(mask: np.ndarray) -> np.ndarray:
    octets = np.packbits(mask, bitorder="little")
    if octets.size % 8:
        octets = np.concatenate([octets, np.zeros(-octets.size % 8, np.uint8)])
    return octets.view("<u8")


def _cumulative(words: np.ndarray) -> np.ndarray:
    """int32: how many bits are set before each word, and in all."""
    cumulative = np.zeros(words.size + 1, np.int32)
    np.cumsum(np.bitwise_count(words).astype(np.int32), out=cumulative[1:])
    return cumulative


def _bits_before(words: np.ndarray, places: np.ndarray) -> np.ndarray:
    """How many bits are set before each of `places`."""
    word = places >> 6
    low = (np.uint64(1) << (places & 63).astype(np.uint64)) - np.uint64(1)
    return _cumulative(words)[word] + np.bitwise_count(words[word] & low)


def _select(words: np.ndarray, bit_ranks: np.ndarray) -> np.ndarray:
    """The place of set bit number `bit_ranks` (ascending, from 0): the inverse of `_bits_before`.

    Source: S. Vigna, "Broadword implementation of rank/select queries" (2008), section 3.
    """
    cumulative = _cumulative(words)
    if bit_ranks.size * _DENSE > int(cumulative[-1]):
        word = np.repeat(np.arange(words.size, dtype=np.int32), np.bitwise_count(words))[bit_ranks]
    else:
        word = np.searchsorted(cumulative[1:], bit_ranks.astype(np.int32), side="right")
    bits = words[word]
    rank = (bit_ranks - cumulative[word]).astype(np.uint64)
    byte_counts = np.bitwise_count(bits.view(np.uint8)).view("<u8")
    through = byte_counts * _EACH_BYTE  # byte i: bits set in bytes 0..i
    passed = ((rank * _EACH_BYTE) | _EACH_TOP_BIT) - through & _EACH_TOP_BIT
    shift = np.bitwise_count(passed).astype(np.uint64) << np.uint64(3)
    rank -= (through << np.uint64(8)) >> shift & np.uint64(0xFF)
    octet = bits >> shift & np.uint64(0xFF)
    inside = _BIT_OF_RANK[(octet << np.uint64(3) | rank).astype(np.intp)]
    return (word.astype(np.int64) << 6) + shift.astype(np.int64) + inside


def _bit_of_rank() -> np.ndarray:
    """uint8[256 * 8]: the place in a byte of its set bit number r, at 8 * byte + r."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.argsort(1 - bits, axis=1, kind="stable").astype(np.uint8).reshape(-1)


_DENSE = 8  # members a selected rank from which listing the word of every member beats searching
_EACH_BYTE = np.uint64(0x0101010101010101)
_EACH_TOP_BIT = np.uint64(0x8080808080808080)
_BIT_OF_RANK = _bit_of_rank()
