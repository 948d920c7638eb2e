"""Elements grouped by the magnitude of their old value, and positions as ranks inside a group.

How likely an element is to change depends on how far apart representable numbers are around it, that is, on
the exponent of its old value, which the decoder knows. Elements are therefore split into up to 16 classes
by exponent, neighbouring classes merged where telling them apart costs more than it gains, and a position
is coded as its rank among the elements of its class. A partition is a 15-bit mask over the boundaries
between the classes.
"""

from __future__ import annotations

import dataclasses

import numpy as np

CLASSES = 16
_EXPONENT_SHIFT = {1: 3, 2: 7, 4: 23}  # of e4m3, BF16 and F32 patterns, by bytes
_SAMPLE = 1 << 16  # elements that classes are chosen from


@dataclasses.dataclass(frozen=True)
class ClassRanks:
    """Ranks of changed elements in their classes, for a writer without the old array.

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
    """The exponent field at which classes start, such that the last class holds about the largest value."""
    if old.dtype.itemsize == 1 or old.size == 0:
        return 0
    largest = int(magnitudes(old[:: max(1, old.size // _SAMPLE)]).max())
    return max(0, (largest >> _EXPONENT_SHIFT[old.dtype.itemsize]) - (CLASSES - 1))


def boundary_values(itemsize: int, start: int) -> np.ndarray:
    """Smallest magnitude int64 of each class but the first; the exponent fields count from `start`."""
    return (start + np.arange(1, CLASSES, dtype=np.int64)) << _EXPONENT_SHIFT[itemsize]


def fine_classes(values: np.ndarray, start: int) -> np.ndarray:
    """Class uint8 (before merging) of each old value."""
    shift = values.dtype.type(_EXPONENT_SHIFT[values.dtype.itemsize])
    exponents = magnitudes(values) >> shift
    if not start and values.dtype.itemsize == 1:
        return exponents
    return np.clip(exponents.astype(np.int16) - start, 0, CLASSES - 1).astype(np.uint8)


def estimate_counts(old: np.ndarray, start: int, changed: np.ndarray) -> np.ndarray:
    """About how many elements each fine class holds, from a sample; at least `changed` of them."""
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
        costs = np.array(best[:end]) + _position_bits(n, m) + value_bits[:end, end - 1] + class_bits
        came_from[end] = int(np.argmin(costs))
        best[end] = float(costs[came_from[end]])
    mask, end = 0, CLASSES
    while came_from[end] > 0:
        end = came_from[end]
        mask |= 1 << (end - 1)
    return mask


def choose_boundary(counts: np.ndarray, changed: np.ndarray, value_bits: np.ndarray) -> int:
    """The mask of two classes with the fewest bits; arguments as `choose_partition`."""
    masks = [1 << j for j in range(CLASSES - 1)]
    return min(masks, key=lambda mask: coded_bits(counts, changed, value_bits, mask))


def coded_bits(counts: np.ndarray, changed: np.ndarray, value_bits: np.ndarray, mask: int) -> float:
    """Bits of positions and values under partition `mask`; arguments as `choose_partition`."""
    ends = [*(j + 1 for j in range(CLASSES - 1) if mask >> j & 1), CLASSES]
    bits = 0.0
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        n, m = float(counts[begin:end].sum()), float(changed[begin:end].sum())
        bits += float(_position_bits(np.array([n]), np.array([m]))[0]) + float(value_bits[begin, end - 1])
    return bits


def _position_bits(n: np.ndarray, m: np.ndarray) -> np.ndarray:
    """Entropy, in bits, of which m of n elements change."""
    bits = m * np.log2(np.maximum(n, 1) / np.maximum(m, 1))
    return bits + (n - m) * np.log2(np.maximum(n, 1) / np.maximum(n - m, 1))


ALL_CLASSES = (1 << (CLASSES - 1)) - 1  # the partition that merges none


def used_boundaries(mask: int, itemsize: int, start: int) -> np.ndarray:
    """Magnitudes that separate the classes of partition `mask`."""
    chosen = [j for j in range(CLASSES - 1) if mask >> j & 1]
    return boundary_values(itemsize, start)[chosen]


def merged_classes(fine: np.ndarray, mask: int) -> np.ndarray:
    """Class uint8 in the partition of each fine class number."""
    lookup = np.cumsum([0, *((mask >> j) & 1 for j in range(CLASSES - 1))]).astype(np.uint8)
    return lookup.take(fine)
