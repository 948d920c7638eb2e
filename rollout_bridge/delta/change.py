"""What an update of one array is: as a writer has it, and as a reader finds it."""

from __future__ import annotations

import dataclasses

import numpy as np

from rollout_bridge.delta.classes import ClassRanks


@dataclasses.dataclass(frozen=True)
class SparseChange:
    """The elements that change: flat `indices` int64, ascending, and their new `values`."""

    indices: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class DenseChange:
    """All new values of an array, in its shape."""

    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class ArrayChange:
    """The update of one array: flat `indices` ascending, their `old_values` and `new_values`, the `size` of
    the array, and where the writer has them the whole `old` array or the `ranks` of the changed elements
    (`encode_sparse` says what they are good for).
    """

    indices: np.ndarray
    old_values: np.ndarray
    new_values: np.ndarray
    size: int
    old: np.ndarray | None = None
    ranks: ClassRanks | None = None

    @classmethod
    def between(cls, old: np.ndarray, new: np.ndarray) -> ArrayChange:
        """The update from `old` to `new`, of one shape and dtype."""
        if old.shape != new.shape or old.dtype != new.dtype:
            raise ValueError(
                f"an update keeps shape and dtype, found {old.dtype}{list(old.shape)} ->"
                f" {new.dtype}{list(new.shape)}"
            )
        old_flat, new_flat = np.ascontiguousarray(old).reshape(-1), np.ascontiguousarray(new).reshape(-1)
        indices = np.flatnonzero(old_flat != new_flat)
        return cls(indices, old_flat[indices], new_flat[indices], old.size, old_flat)
