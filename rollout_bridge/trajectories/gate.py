"""The fresh-token-fraction gate (Solar Open 2, arXiv 2607.20062): stale tokens are masked, stale trajectories
dropped.

Freshness only falls as the trainer advances, so a trajectory refused once is refused for good.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The published threshold and lag are unknown.

    max_lag: versions a token may be behind the trainer's.
    min_fresh_fraction: of the trainable tokens that must be fresh for a trajectory to be used, in [0, 1].
    """

    max_lag: int
    min_fresh_fraction: float

    def __post_init__(self) -> None:
        if self.max_lag < 0:
            raise ValueError(f"trajectories.max_lag: {self.max_lag} is negative; 0 is strictly on-policy")
        if not 0 <= self.min_fresh_fraction <= 1:
            raise ValueError(f"trajectories.min_fresh_fraction: {self.min_fresh_fraction} is not in [0, 1]")


def fresh_tokens(version_counts: Iterable[tuple[int, int]], *, version: int, max_lag: int) -> int:
    """Number of fresh tokens, version - token version <= max_lag, from (token version, count) pairs."""
    return sum(count for token_version, count in version_counts if version - token_version <= max_lag)


def passes(version_counts: Iterable[tuple[int, int]], *, version: int, gate: Gate) -> bool:
    """Whether enough of the trainable tokens are fresh, at least one of them in any case."""
    counts = list(version_counts)
    total = sum(count for _, count in counts)
    fresh = fresh_tokens(counts, version=version, max_lag=gate.max_lag)
    return fresh > 0 and fresh >= gate.min_fresh_fraction * total


def fresh_mask(versions: np.ndarray, trainable: np.ndarray, *, version: int, max_lag: int) -> np.ndarray:
    """bool [T]: trainable tokens that are fresh at trainer version `version`."""
    return np.asarray(trainable, bool) & (version - np.asarray(versions, np.int64) <= max_lag)
