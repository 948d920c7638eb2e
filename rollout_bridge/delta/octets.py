"""Reading and writing the parts of a blob: integers of varying length, compressed frames."""

from __future__ import annotations

import zstandard

from rollout_bridge.delta.errors import DeltaError

_VARINT_BYTES = 9


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
            raise DeltaError(f"the blob announces {announced} bytes of values, {size} are due; it is damaged")
        content = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"the compressed values are damaged: {error}") from error
    if len(content) != size:
        raise DeltaError(f"the blob holds {len(content)} bytes of values, {size} are due; it is damaged")
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
                f"the blob ends after {len(self._data)} bytes, {count} more were due at {self._at}; it is"
                " truncated"
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
