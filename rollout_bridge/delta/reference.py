"""The yardstick of the codec: bytes of an update whose elements are coded apart, given their old value."""

from __future__ import annotations

import numpy as np

_MANY = 1 << 11  # changes of one-byte values from which a table of all pairs beats sorting


def conditional_entropy_bytes(old: np.ndarray, new: np.ndarray) -> float:
    """size * H(new | old) / 8 in bytes, with the empirical order-0 distribution of new for each old value.

    A bound for any code that treats elements alike and apart; it charges nothing for the distribution itself,
    so on small arrays no code reaches it.
    """
    old_flat, new_flat = np.asarray(old).reshape(-1), np.asarray(new).reshape(-1)
    changed = np.flatnonzero(old_flat != new_flat)
    values, counts = np.unique(old_flat, return_counts=True)
    return conditional_entropy_bytes_sparse((values, counts), old_flat[changed], new_flat[changed])


def conditional_entropy_bytes_sparse(
    old_counts: tuple[np.ndarray, np.ndarray] | np.ndarray, changed_old: np.ndarray, changed_new: np.ndarray
) -> float:
    """`conditional_entropy_bytes` from the histogram of all old values and the values of the changed
    elements.

    old_counts: (distinct old values, how often each occurs), or an array of counts indexed by value.
    """
    if isinstance(old_counts, tuple):
        values, counts = old_counts
    else:
        values, counts = np.flatnonzero(old_counts), np.asarray(old_counts)[np.flatnonzero(old_counts)]
    if changed_old.size == 0:
        return 0.0
    if changed_old.dtype.itemsize == 1 and changed_old.size > _MANY:
        table = np.bincount(changed_old.astype(np.int64) << 8 | changed_new, minlength=1 << 16)
        found = np.flatnonzero(table)
        pairs, pair_counts = (found >> 8 << 32 | found & 0xFF).astype(np.uint64), table[found]
    else:
        keys = (changed_old.astype(np.uint64) << np.uint64(32)) | changed_new.astype(np.uint64)
        pairs, pair_counts = np.unique(keys, return_counts=True)
    place = np.searchsorted(values, (pairs >> np.uint64(32)).astype(values.dtype))
    moved = np.zeros(len(values), np.int64)
    np.add.at(moved, place, pair_counts)
    stayed = counts.astype(np.int64) - moved
    totals = counts[place].astype(np.float64)
    bits = float((pair_counts * np.log2(totals / pair_counts)).sum())
    partly = (moved > 0) & (stayed > 0)
    bits += float((stayed[partly] * np.log2(counts[partly] / stayed[partly])).sum())
    return bits / 8
