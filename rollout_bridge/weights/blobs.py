"""Objects of the chain on their way to a reader: fetched ahead, checked, kept while they may be wanted again.

Every method may be called by several threads at once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash

from rollout_bridge import delta
from rollout_bridge.store import Store
from rollout_bridge.weights.manifest import BrokenVersion, ManifestRef, Piece

_KEPT_CHANGES = 1 << 24  # in groups read last: about 200 MB


class Blobs:
    """Objects of the chain, fetched on `threads`, the last ones kept up to `limit_bytes`.

    A piece that is wrong is fetched `attempts` times in all before its version counts as broken.
    """

    def __init__(
        self, store: Store, *, attempts: int = 3, threads: int = 4, limit_bytes: int = 2 << 30
    ) -> None:
        self._store = store
        self._attempts = attempts
        self._limit = limit_bytes
        self._lock = threading.Lock()  # of the four below
        self._coming: dict[str, Future[bytes | None]] = {}
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._groups: OrderedDict[tuple[object, ...], Future[delta.Group]] = OrderedDict()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="blobs")

    def prefetch(self, keys: Iterable[str]) -> None:
        """Starts fetching objects that will be asked for soon."""
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
                found = xxhash.xxh3_128_hexdigest(content)
                if found == piece.hash:
                    return content
                reason = f"bytes {piece.offset}+{piece.length} have hash {found}, expected {piece.hash}"
            self._forget(key, data)
        raise BrokenVersion(ref, key, f"{reason} (read {self._attempts} times)")

    def change(self, ref: ManifestRef, piece: Piece, before: np.ndarray) -> delta.SparseChange | delta.Dense:
        """The change of a rectangle whose bits were `before`. Raises `BrokenVersion`, or `DeltaError`.

        A blob that several pieces share is fetched, checked and read once, as long as it is among the last.
        """
        if piece.member is None:
            return delta.decode_sparse(self.piece(ref, piece), before)
        return self._group(ref, piece, before.dtype).change(piece.member, before)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _object(self, key: str) -> bytes | None:
        """The object, from the last ones or the store: by one read, however many threads ask."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            coming = self._coming.get(key)
            if coming is None:
                coming = self._coming[key] = self._pool.submit(self._store.read, key)
        try:
            data = coming.result()  # a read ends within the store's timeout
        finally:
            with self._lock:
                first = self._coming.get(key) is coming
                if first:
                    del self._coming[key]
        if first and data is not None:
            self._keep(key, data)
        return data

    def _keep(self, key: str, data: bytes) -> None:
        with self._lock:
            self._kept[key] = data
            self._kept_bytes += len(data)
            while self._kept_bytes > self._limit and len(self._kept) > 1:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])

    def _forget(self, key: str, data: bytes | None) -> None:
        """Makes the next one who asks fetch again, unless another thread has done so."""
        with self._lock:
            if data is not None and self._kept.get(key) is data:
                self._kept_bytes -= len(self._kept.pop(key))

    def _group(self, ref: ManifestRef, piece: Piece, dtype: np.dtype) -> delta.Group:
        """The blob that pieces share, read by the first thread that asks; the others wait for it."""
        place = ref, piece.key, piece.offset, piece.length, piece.hash, dtype.itemsize
        with self._lock:
            reading = self._groups.get(place)
            mine = reading is None
            if reading is None:
                reading = self._groups[place] = Future()
            self._groups.move_to_end(place)
        if not mine:
            return reading.result()
        try:
            group = delta.decode_group(self.piece(ref, piece), dtype)
        except BaseException as error:
            with self._lock:
                self._groups.pop(place)
            reading.set_exception(error)
            raise
        reading.set_result(group)
        with self._lock:
            read = [kept for kept in self._groups.values() if kept.done()]
            surplus = sum(kept.result().changes for kept in read) - _KEPT_CHANGES
            for oldest in [place for place, kept in self._groups.items() if kept.done()][:-1]:
                if surplus <= 0:
                    break
                surplus -= self._groups.pop(oldest).result().changes
        return group
