"""Reading blobs: objects are fetched ahead, checked, and kept while they may be needed again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rollout_bridge import delta
from rollout_bridge.store import Store
from rollout_bridge.weights.format.manifest import BrokenVersion, ManifestRef, Piece, piece_hash

_KEPT_CHANGES = 1 << 24  # in groups read last: about 200 MB


class Blobs:
    """Objects of the chain, fetched on `threads`, the last ones kept up to `limit_bytes`.

    A wrong piece is fetched `attempts` times in all before its version counts as broken. Thread-safe.
    """

    def __init__(
        self, store: Store, *, attempts: int = 3, threads: int = 4, limit_bytes: int = 2 << 30
    ) -> None:
        self._store = store
        self._attempts = attempts
        self._limit = limit_bytes
        self._lock = threading.Lock()  # of the three below
        self._coming: dict[str, Future[bytes | None]] = {}
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="blobs")

    def prefetch(self, keys: Iterable[str]) -> None:
        """Starts fetching objects that will be needed soon."""
        with self._lock:
            for key in keys:
                if key not in self._kept and key not in self._coming:
                    self._coming[key] = self._pool.submit(self._store.read, key)

    def piece(self, ref: ManifestRef, piece: Piece) -> bytes:
        """The checked bytes of one piece of version `ref`. Raises `BrokenVersion`."""
        key = ref.directory + piece.key
        reason = ""
        for _ in range(self._attempts):
            data = self._object(key)
            if data is None:
                reason = "missing"
            elif len(data) < piece.offset + piece.length:
                reason = f"truncated: {len(data)} bytes, expected at least {piece.offset + piece.length}"
            else:
                content = data[piece.offset : piece.offset + piece.length]
                found = piece_hash(content)
                if found == piece.hash:
                    return content
                reason = f"bytes {piece.offset}+{piece.length} have hash {found}, expected {piece.hash}"
            self._forget(key, data)
        raise BrokenVersion(ref, key, f"{reason} (read {self._attempts} times)")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _object(self, key: str) -> bytes | None:
        """The object, from memory or from the store. Threads that need one object share one read."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            coming = self._coming.get(key)
            if coming is None:
                coming = self._coming[key] = self._pool.submit(self._store.read, key)
        try:
            data = coming.result()  # a read ends within the store's timeout
        except BaseException:
            with self._lock:
                self._arrived(key, coming)
            raise
        with self._lock:  # under one lock: another thread finds the object in `_coming` or in `_kept`
            if self._arrived(key, coming) and data is not None:
                self._keep(key, data)
        return data

    def _arrived(self, key: str, coming: Future[bytes | None]) -> bool:
        """Whether the caller is the first thread to receive the object. The caller holds the lock."""
        first = self._coming.get(key) is coming
        if first:
            del self._coming[key]
        return first

    def _keep(self, key: str, data: bytes) -> None:
        """Keeps an object and drops the oldest past the limit. The caller holds the lock."""
        self._kept[key] = data
        self._kept_bytes += len(data)
        while self._kept_bytes > self._limit and len(self._kept) > 1:
            self._kept_bytes -= len(self._kept.popitem(last=False)[1])

    def _forget(self, key: str, data: bytes | None) -> None:
        """Drops a wrong object, so that the next read fetches it again."""
        with self._lock:
            if data is not None and self._kept.get(key) is data:
                self._kept_bytes -= len(self._kept.pop(key))


class PieceSource(Protocol):
    """Returns the checked bytes of pieces."""

    def piece(self, ref: ManifestRef, piece: Piece) -> bytes: ...


@dataclass(frozen=True)
class HeldPieces:
    """Pieces already fetched and checked, to be sent to another process."""

    held: dict[tuple[str, int, int], bytes]

    @classmethod
    def of(cls, blobs: PieceSource, wanted: Iterable[tuple[ManifestRef, Piece]]) -> HeldPieces:
        """Raises `BrokenVersion` if a piece cannot be read."""
        held: dict[tuple[str, int, int], bytes] = {}
        for ref, piece in wanted:
            place = _place(ref, piece)
            if place not in held:
                held[place] = blobs.piece(ref, piece)
        return cls(held)

    def piece(self, ref: ManifestRef, piece: Piece) -> bytes:
        return self.held[_place(ref, piece)]


def _place(ref: ManifestRef, piece: Piece) -> tuple[str, int, int]:
    return ref.directory + piece.key, piece.offset, piece.length


class ChangeDecoder:
    """Decodes pieces to changes. A blob that several pieces share is decoded once while it is kept.

    Not thread-safe.
    """

    def __init__(self, pieces: PieceSource) -> None:
        self.pieces = pieces
        self._groups: OrderedDict[tuple[object, ...], delta.Group] = OrderedDict()
        self._ahead: dict[tuple[object, ...], delta.SparseChange] = {}

    def decode_ahead(self, wanted: Iterable[tuple[ManifestRef, Piece, np.ndarray]]) -> None:
        """Decodes together what the next calls of `change` need, which is several times faster.

        Raises `BrokenVersion` if a piece cannot be read.
        """
        shared: dict[tuple[object, ...], list[tuple[ManifestRef, Piece, np.ndarray]]] = {}
        for ref, piece, before in wanted:
            if piece.member is not None:
                shared.setdefault(_group_place(ref, piece, before), []).append((ref, piece, before))
        self._ahead.clear()
        for place, members in shared.items():
            ref, piece, before = members[0]
            numbers = [piece.member for _, piece, _ in members if piece.member is not None]
            befores = [before for *_, before in members]
            try:
                found = self._group(ref, piece, before).changes_of(numbers, befores)
            except delta.DeltaError:
                continue  # `change` decodes them one by one and names the damaged one
            self._ahead |= {(*place, number): change for number, change in zip(numbers, found, strict=True)}

    def change(
        self, ref: ManifestRef, piece: Piece, before: np.ndarray
    ) -> delta.SparseChange | delta.DenseChange:
        """The change of a rectangle whose bits were `before`. Raises `BrokenVersion`, or `DeltaError`."""
        if piece.member is None:
            return delta.decode_sparse(self.pieces.piece(ref, piece), before)
        known = self._ahead.pop((*_group_place(ref, piece, before), piece.member), None)
        return self._group(ref, piece, before).change(piece.member, before) if known is None else known

    def _group(self, ref: ManifestRef, piece: Piece, before: np.ndarray) -> delta.Group:
        place = _group_place(ref, piece, before)
        group = self._groups.pop(place, None)
        if group is None:
            group = delta.decode_group(self.pieces.piece(ref, piece), before.dtype)
        self._groups[place] = group
        while sum(kept.changes for kept in self._groups.values()) > _KEPT_CHANGES and len(self._groups) > 1:
            self._groups.popitem(last=False)
        return group


def _group_place(ref: ManifestRef, piece: Piece, before: np.ndarray) -> tuple[object, ...]:
    return *_place(ref, piece), piece.hash, before.dtype.itemsize
