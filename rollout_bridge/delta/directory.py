"""Which element is the r-th of its class, and which rank in its class an element has.

A class is a run of magnitudes between two boundaries. Its members are kept as bits, with how many come before
each word of 64: `Directory` for one array, `Members` for several small ones at once.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rollout_bridge.delta.classes import magnitudes

_CHUNK = 1 << 19  # elements whose classes are found at once: a few passes stay within a core's cache
_SLICE = 1 << 15  # changes looked up at once, for the same reason


@dataclasses.dataclass(frozen=True)
class Directory:
    """The members of each class of a flat array.

    words uint64[classes, ceil(size / 64)]: bit i of word w stands for element 64 w + i. before int[classes,
    words + 1]: members before each word, and in all.
    """

    words: np.ndarray
    before: np.ndarray

    @classmethod
    def of(cls, old: np.ndarray, boundaries: np.ndarray) -> Directory:
        """The directory of flat `old`, its classes split at ascending magnitudes `boundaries`.

        Of one class, which needs none, only the size is kept.
        """
        if not len(boundaries):
            return cls(np.zeros((1, 0), "<u8"), np.array([[old.size]]))
        count = -(-old.size // 64)
        words = np.empty((len(boundaries) + 1, count), "<u8")
        words[:, -1:] = 0  # the bits past the end
        for begin in range(0, old.size, _CHUNK):
            part = magnitudes(old[begin : begin + _CHUNK])
            here = words[:, begin // 64 : begin // 64 + -(-part.size // 64)]
            _fill(here.view(np.uint8), part, boundaries)
        before = np.zeros((len(words), count + 1), np.int32 if old.size < 1 << 31 else np.int64)
        rest = np.minimum(np.arange(count + 1, dtype=before.dtype) * 64, old.size)
        for members, total in zip(words[:-1], before[:-1], strict=True):
            np.cumsum(np.bitwise_count(members), out=total[1:])
            rest -= total
        before[-1] = rest
        return cls(words, before)

    @property
    def sizes(self) -> np.ndarray:
        """Members int64[classes] of each class."""
        return self.before[:, -1].astype(np.int64)

    def ranks(self, number: int, indices: np.ndarray) -> np.ndarray:
        """Rank int64 among the members of class `number` of the ascending flat `indices`, all in it."""
        ranks = np.empty_like(indices)
        counts = np.zeros(len(self.words), np.int64)
        for begin in range(0, indices.size, _SLICE):
            part = indices[begin : begin + _SLICE]
            counts[number] = part.size
            ranks[begin : begin + _SLICE] = self.ranks_of_classes(counts, part)
        return ranks

    def ranks_of_classes(self, counts: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Rank int64 of each of the flat `indices` in its class: the first counts[0] of class 0, and so on.

        All at once, whatever the number of classes: for as many as stay within a core's cache.
        """
        if len(self.words) == 1:
            return indices
        low = (np.uint64(1) << (indices & 63).view(np.uint64)) - np.uint64(1)
        rows = np.arange(len(self.words))
        at = indices >> 6
        at += np.repeat(rows * self.words.shape[1], counts)
        low &= self.words.reshape(-1).take(at)
        at += np.repeat(rows, counts)  # `before` has one column more than `words`
        return np.add(self.before.reshape(-1).take(at), np.bitwise_count(low), dtype=np.int64)

    def positions(self, number: int, ranks: np.ndarray) -> np.ndarray:
        """Flat position int64 of the ascending `ranks` of class `number`, each below its size.

        The inverse of `ranks`. Source: S. Vigna, "Broadword implementation of rank/select queries" (2008),
        section 3.
        """
        if len(self.words) == 1:
            return ranks
        before, words = self.before[number], self.words[number]
        positions = np.empty_like(ranks)
        for begin in range(0, ranks.size, _SLICE):
            part = ranks[begin : begin + _SLICE]
            low, high = np.searchsorted(before, part[[0, -1]].astype(before.dtype), side="right")
            if part.size * _DENSE > part[-1] - part[0]:
                counts = np.diff(before[low - 1 : high + 1])
                word = np.repeat(np.arange(low - 1, high), counts)[part - before[low - 1]]
            else:
                word = np.searchsorted(before[low:high], part.astype(before.dtype), side="right") + (low - 1)
            inside = place_in_word(words[word], part - before[word])
            np.add(word << 6, inside, out=positions[begin : begin + _SLICE])
        return positions


@dataclasses.dataclass(frozen=True)
class Members:
    """The members of each class of small arrays end to end.

    The bits of each class follow one another in one row of words, so one cumulative count ranks the members
    of every class of every array. That costs by the element, not by the numpy call for each array and class.

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
        """Members int64[classes, places] before flat `places`, those of earlier classes included."""
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


def _fill(octets: np.ndarray, magnitude: np.ndarray, boundaries: np.ndarray) -> None:
    """Sets the bits uint8[classes, bytes] of the members of each class."""
    used = -(-magnitude.size // 8)
    below = np.zeros(used, np.uint8)
    for number, boundary in enumerate(boundaries):
        upper = np.packbits(magnitude < magnitude.dtype.type(boundary), bitorder="little")
        np.bitwise_xor(upper, below, out=octets[number, :used])
        below = upper
    np.invert(below, out=octets[-1, :used])
    if magnitude.size % 8:
        octets[-1, used - 1] &= (1 << magnitude.size % 8) - 1


def place_in_word(bits: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """The place int64 in each word of its set bit number `ranks`, from 0."""
    rank = ranks.astype(np.uint64)
    through = np.bitwise_count(bits.view(np.uint8)).view("<u8") * _EACH_BYTE  # byte i: bits set in bytes 0..i
    passed = ((rank * _EACH_BYTE) | _EACH_TOP_BIT) - through & _EACH_TOP_BIT
    shift = np.bitwise_count(passed).astype(np.uint64) << np.uint64(3)
    rank -= (through << np.uint64(8)) >> shift & np.uint64(0xFF)
    octet = bits >> shift & np.uint64(0xFF)
    inside = _BIT_OF_RANK[(octet << np.uint64(3) | rank).view(np.int64)]
    return shift.view(np.int64) + inside


def _bit_of_rank() -> np.ndarray:
    """uint8[256 * 8]: the place in a byte of its set bit number r, at 8 * byte + r."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.argsort(1 - bits, axis=1, kind="stable").astype(np.uint8).reshape(-1)


_DENSE = 8  # members a selected rank from which listing the word of every member beats searching
_EACH_BYTE = np.uint64(0x0101010101010101)
_EACH_TOP_BIT = np.uint64(0x8080808080808080)
_BIT_OF_RANK = _bit_of_rank()
