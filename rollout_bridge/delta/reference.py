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
    """`conditional_entropy_bytes` from the histogram of all old values and the changed values.

    old_counts: (distinct old values, how often each occurs), or an array of counts indexed by value.
    """
    if changed_old.size == 0:
        return 0.0
    if changed_old.dtype.itemsize == 1 and changed_old.size > _MANY:
        table = np.bincount(changed_old.astype(np.uint16) << 8 | changed_new, minlength=1 << 16)
        pairs = np.flatnonzero(table)
        olds, pair_counts = pairs >> 8, table[pairs]
    else:
        both = np.uint32 if changed_old.dtype.itemsize <= 2 else np.uint64
        width = both(8 * changed_old.dtype.itemsize)
        keys = changed_old.astype(both) << width | changed_new
        pairs, pair_counts = np.unique(keys, return_counts=True)
        olds = (pairs >> width).astype(np.int64)
    firsts = np.flatnonzero(np.diff(olds, prepend=-1))  # of the pairs of one old value
    moved = np.add.reduceat(pair_counts, firsts)
    if isinstance(old_counts, tuple):
        values, counts = old_counts
        totals = counts[np.searchsorted(values, olds[firsts].astype(values.dtype))]
    else:
        totals = np.asarray(old_counts)[olds[firsts]]
    bits = float(
        (pair_counts * np.log2(np.repeat(totals, np.diff(firsts, append=olds.size)) / pair_counts)).sum()
    )
    stayed = totals - moved
    partly = stayed > 0
    bits += float((stayed[partly] * np.log2(totals[partly] / stayed[partly])).sum())
    return bits / 8
