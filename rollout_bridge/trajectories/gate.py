"""The fresh-token-fraction gate (Solar Open 2, arXiv 2607.20062): stale tokens are masked, stale trajectories
dropped.

Lag is in optimizer steps, from the weights of a token's version to those that the step trains, so a slow
upload does not hide it. It only grows as the trainer advances: a trajectory refused once is refused for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

Lag = Callable[[int], int]  # of a version, in optimizer steps


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The published threshold and lag are unknown.

    max_lag: optimizer steps a token may be behind the trainer's weights.
    min_fresh_fraction: of the trainable tokens that must be fresh for a trajectory to be used, in [0, 1].
    """

    max_lag: int
    min_fresh_fraction: float

    def __post_init__(self) -> None:
        if self.max_lag < 0:
            raise ValueError(f"trajectories.max_lag: {self.max_lag} is negative; 0 is strictly on-policy")
        if not 0 <= self.min_fresh_fraction <= 1:
            raise ValueError(f"trajectories.min_fresh_fraction: {self.min_fresh_fraction} is not in [0, 1]")


def fresh_tokens(version_counts: Iterable[tuple[int, int]], *, lag: Lag, max_lag: int) -> int:
    """Number of fresh tokens, lag at most max_lag, from (token version, count) pairs."""
    return sum(count for token_version, count in version_counts if lag(token_version) <= max_lag)


def passes(version_counts: Iterable[tuple[int, int]], *, lag: Lag, gate: Gate) -> bool:
    """Whether enough of the trainable tokens are fresh, at least one of them in any case."""
    counts = list(version_counts)
    total = sum(count for _, count in counts)
    fresh = fresh_tokens(counts, lag=lag, max_lag=gate.max_lag)
    return fresh > 0 and fresh >= gate.min_fresh_fraction * total


def lags_of(versions: np.ndarray, lag: Lag) -> np.ndarray:
    """int64 [T]: the lag of each token."""
    found, places = np.unique(versions, return_inverse=True)
    return np.array([lag(int(version)) for version in found], np.int64)[places]


def fresh_mask(versions: np.ndarray, trainable: np.ndarray, *, lag: Lag, max_lag: int) -> np.ndarray:
    """bool [T]: trainable tokens that are fresh."""
    return np.asarray(trainable, bool) & (lags_of(versions, lag) <= max_lag)
