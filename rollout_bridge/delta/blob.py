"""What blobs are made of: changes of arrays, integers of varying length, compressed frames."""

from __future__ import annotations

import dataclasses

import numpy as np
import zstandard

from rollout_bridge.delta.classes import ClassRanks

DTYPES = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32))  # of bit patterns, by width code
_VARINT_BYTES = 9


class DeltaError(ValueError):
    """A blob is no update of the array it is applied to: damaged, of another array, or of a newer codec."""


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
    """The update of an array of `size` elements: ascending flat `indices`, `old_values` and `new_values`.

    old, ranks: the whole array before, or the ranks of the changed elements; each makes the blob smaller.
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
                f"an update keeps shape and dtype, found {old.dtype}{list(old.shape)} -> "
                f"{new.dtype}{list(new.shape)}"
            )
        old_flat, new_flat = np.ascontiguousarray(old).reshape(-1), np.ascontiguousarray(new).reshape(-1)
        indices = np.flatnonzero(old_flat != new_flat)
        return cls(indices, old_flat[indices], new_flat[indices], old.size, old_flat)


def varint(value: int) -> bytes:
    """A non-negative integer below 2**63, seven bits a byte, least significant first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def inflate(data: bytes, size: int) -> bytes:
    """The content of a zstandard frame that holds exactly `size` bytes; DeltaError on any other, unread."""
    try:
        announced = zstandard.get_frame_parameters(data).content_size
        if announced != size:
            raise DeltaError(
                f"the blob announces {announced} bytes of values, {size} are expected; it is damaged"
            )
        content = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"the compressed values are damaged: {error}") from error
    if len(content) != size:
        raise DeltaError(f"the blob holds {len(content)} bytes of values, {size} are expected; it is damaged")
    return content


class Reader:
    """Takes a blob from the front; DeltaError where it ends too early or too late."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > len(self._data) - self._at:
            raise DeltaError(
                f"the blob ends after {len(self._data)} bytes, {count} were expected at {self._at}; truncated"
            )
        self._at += count
        return self._data[self._at - count : self._at]

    def byte(self) -> int:
        """The next byte."""
        return self.take(1)[0]

    def varint(self) -> int:
        """The next integer of `varint`."""
        value = 0
        for place in range(_VARINT_BYTES):
            octet = self.byte()
            value |= (octet & 0x7F) << (7 * place)
            if octet < 0x80:
                return value
        raise DeltaError(
            f"an integer at byte {self._at} runs past {_VARINT_BYTES} bytes; the blob is damaged"
        )

    def rest(self) -> bytes:
        """All bytes not taken yet, without taking them."""
        return self._data[self._at :]

    def end(self) -> None:
        """DeltaError unless everything was taken."""
        if self._at != len(self._data):
            raise DeltaError(
                f"{len(self._data) - self._at} bytes follow the end of the update; the blob is damaged"
            )
