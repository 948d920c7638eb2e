"""Elements grouped by the magnitude of their old value, and positions as ranks inside a group.

How likely an element is to change depends on how far apart representable numbers are around it, that is, on
the exponent of its old value, which the decoder knows. Elements are therefore split into up to 16 classes
by exponent, neighbouring classes merged where telling them apart costs more than it gains, and a position
is coded as its rank among the elements of its class. A partition is a 15-bit mask over the boundaries
between the classes.
"""

from __future__ import annotations

import numpy as np

CLASSES = 16
_EXPONENT_SHIFT = {1: 3, 2: 7, 4: 23}  # of e4m3, BF16 and F32 patterns, by bytes
_CHUNK = 1 << 20
_SAMPLE = 1 << 18


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


def used_boundaries(mask: int, itemsize: int, start: int) -> np.ndarray:
    """Magnitudes that separate the classes of partition `mask`."""
    chosen = [j for j in range(CLASSES - 1) if mask >> j & 1]
    return boundary_values(itemsize, start)[chosen]


def merged_classes(fine: np.ndarray, mask: int) -> np.ndarray:
    """Class in the partition of each fine class number."""
    lookup = np.cumsum([0, *((mask >> j) & 1 for j in range(CLASSES - 1))])
    return lookup[fine]


def count_classes(old: np.ndarray, boundaries: np.ndarray) -> np.ndarray:
    """int64[chunks, classes]: elements of each class in each run of 2**20 elements."""
    rows = []
    for begin in range(0, old.size, _CHUNK):
        part = magnitudes(old[begin : begin + _CHUNK])
        below = [int(np.count_nonzero(part < part.dtype.type(b))) for b in boundaries]
        rows.append(np.diff([0, *below, part.size]))
    return np.array(rows, np.int64).reshape(-1, len(boundaries) + 1)


def ranks(
    old: np.ndarray, indices: np.ndarray, classes: np.ndarray, boundaries: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rank int64 of the elements at ascending `indices` of flat `old` among the elements of their class,
    and class sizes.

    classes: the class of each index.
    """
    sizes = np.zeros(len(boundaries) + 1, np.int64)
    result = np.empty(indices.size, np.int64)
    edges = np.searchsorted(indices, np.arange(0, old.size + _CHUNK, _CHUNK))
    for chunk, begin in enumerate(range(0, old.size, _CHUNK)):
        part = magnitudes(old[begin : begin + _CHUNK])
        inside = slice(edges[chunk], edges[chunk + 1])
        local = indices[inside] - begin
        of_class = classes[inside]
        members = [np.flatnonzero(of_class == k) for k in range(sizes.size)]
        rank = sizes[of_class]
        below_total = 0
        for k, boundary in enumerate(boundaries):
            # Elements of class k before p: those below its upper boundary less those below its lower one.
            words, cumulative = _bit_index(part < part.dtype.type(boundary))
            rank[members[k]] += _bits_before(words, cumulative, local[members[k]])
            rank[members[k + 1]] -= _bits_before(words, cumulative, local[members[k + 1]])
            sizes[k] += cumulative[-1] - below_total
            below_total = int(cumulative[-1])
        rank[members[-1]] += local[members[-1]]
        sizes[-1] += part.size - below_total
        result[inside] = rank
    return result, sizes


def positions(
    old: np.ndarray, boundaries: np.ndarray, counts: np.ndarray, class_ranks: list[np.ndarray]
) -> list[np.ndarray]:
    """Flat position int64 of each of the ascending `class_ranks` of each class; the inverse of `ranks`.

    counts: `count_classes` of the same array. Every rank is below its class's size.
    """
    if not len(boundaries):
        return [class_ranks[0].astype(np.int64)]
    ends = np.cumsum(counts, axis=0)
    edges = [np.searchsorted(r, np.concatenate([[0], e])) for r, e in zip(class_ranks, ends.T, strict=True)]
    out = [np.empty(r.size, np.int64) for r in class_ranks]
    limits = [0, *(int(b) for b in boundaries), None]
    for chunk, begin in enumerate(range(0, old.size, _CHUNK)):
        part = magnitudes(old[begin : begin + _CHUNK])
        for k, ranks_of_class in enumerate(class_ranks):
            inside = slice(edges[k][chunk], edges[k][chunk + 1])
            if inside.start == inside.stop:
                continue
            low, high = limits[k], limits[k + 1]
            member = np.ones(part.size, bool) if high is None else part < part.dtype.type(high)
            if low:
                member &= part >= part.dtype.type(low)
            local = ranks_of_class[inside] - (ends[chunk, k] - counts[chunk, k])
            out[k][inside] = np.flatnonzero(member)[local] + begin
    return out


def _bit_index(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mask as uint64 words, bit i of word w being element 64 w + i, and how many bits come before each
    word.
    """
    octets = np.packbits(mask, bitorder="little")
    padded = np.zeros(-(-octets.size // 8) * 8, np.uint8)
    padded[: octets.size] = octets
    words = padded.view("<u8")
    cumulative = np.zeros(words.size + 1, np.int64)
    np.cumsum(np.bitwise_count(words), out=cumulative[1:])
    return words, cumulative


def _bits_before(words: np.ndarray, cumulative: np.ndarray, places: np.ndarray) -> np.ndarray:
    """How many bits of the mask of `_bit_index` are set before each of `places`."""
    word = places >> 6
    low = (np.uint64(1) << (places & 63).astype(np.uint64)) - np.uint64(1)
    return cumulative[word] + np.bitwise_count(words[word] & low)
