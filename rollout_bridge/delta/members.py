"""Which elements of several arrays are the r-th of their classes: of all by one set of numpy calls.

The bits of each class of the arrays end to end follow one another in one row of words, so that one cumulative
count ranks the members of every class of every array. Small arrays cost by their elements this way; array by
array and class by class they would cost by the call.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rollout_bridge.delta.classes import magnitudes
from rollout_bridge.delta.directory import place_in_word


@dataclasses.dataclass(frozen=True)
class Members:
    """The members of each class of arrays end to end.

    words uint64[classes, columns]: bit i of word w of a class stands for element 64 w + i. before
    int64[classes * columns + 1]: members before each word, those of earlier classes included, and in all.
    """

    words: np.ndarray
    before: np.ndarray

    @classmethod
    def of(cls, joined: np.ndarray, boundaries: np.ndarray) -> Members:
        """The members in flat `joined`, whose classes are split at ascending magnitudes `boundaries`."""
        below = np.empty((len(boundaries) + 1, joined.size // 64 * 64 + 64), bool)
        below[:, joined.size :] = False
        limits = boundaries.astype(joined.dtype)[:, None]
        np.less(magnitudes(joined), limits, out=below[:-1, : joined.size])
        below[-1, : joined.size] = True
        through = np.packbits(below, axis=-1, bitorder="little").view("<u8")
        words = through.copy()
        words[1:] ^= through[:-1]
        before = np.empty(words.size + 1, np.int64)
        before[0] = 0
        np.cumsum(np.bitwise_count(words).reshape(-1), out=before[1:])
        return cls(words, before)

    def passed(self, places: np.ndarray) -> np.ndarray:
        """Members int64[classes, places] before each of some flat `places` from 0 to the end, those of
        earlier classes included.
        """
        word = places >> 6
        low = (np.uint64(1) << (places & 63).astype(np.uint64)) - np.uint64(1)
        before = self.before[:-1].reshape(self.words.shape)[:, word]
        return before + np.bitwise_count(self.words[:, word] & low)

    def positions(self, ranks: np.ndarray) -> np.ndarray:
        """Flat position int64 of the members number `ranks`, ascending, counted as `passed` does."""
        words = self.words.reshape(-1)
        at = np.searchsorted(self.before, ranks, side="right") - 1
        inside = place_in_word(words[at], ranks - self.before[at])
        return (at % self.words.shape[1] << 6) + inside
