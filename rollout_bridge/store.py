"""One flat key space on a disk or in a bucket, with conditional writes: all that trainer and fleet share.

Every pointer that moves in this system (`weights/latest`, `run.json`, claims) moves through `create` or
`swap`. They are only as good as the store behind them, so opening one proves both before anything relies on
them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import tensorstore as ts

from rollout_bridge import file_lock
from rollout_bridge.errors import ExpectedError
from rollout_bridge.waiting import Interrupted, looks, sleep_unless, wait_for

logger = logging.getLogger(__name__)

RETRY_SECONDS, SLOWEST_RETRY_SECONDS = (
    1.0,
    15.0,
)  # between tries of a call; short beside a step of a large model

SCHEMES = ("file", "gs", "s3", "memory")
_KEY = re.compile(r"[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*(/[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*)*")
_MEMORY_CONTEXT = ts.Context()  # memory:// stores of one process see each other, as any other store would
# On disks each write goes to a new file of its own, renamed to the key. TensorStore's locking modes reuse the
# file that a dead writer left, with its bytes or its lock. `file_lock` makes the conditions hold instead.
_FILE_CONTEXT = ts.Context({"file_io_locking": {"mode": "none"}})
_CONTEXTS = {"memory": _MEMORY_CONTEXT, "file": _FILE_CONTEXT}
_writing: dict[int, ts.Future[Any]] = {}  # TensorStore cancels a write that nothing refers to


class StoreError(ExpectedError):
    """The store failed or cannot be trusted; the message names its url, the key and the remedy."""


class StoreAway(StoreError):
    """One call failed or did not end in time; the next may not."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How a process waits for a store that is away.

    seconds: for one call, tried again and again. interrupted: whether the process is stopping; then no call
        is tried again, and `grace` seconds later none begins.
    """

    seconds: float
    grace: float
    interrupted: Callable[[], bool]


class Store:
    """Bytes by key. Synchronous, safe to call from several threads; every call ends within `timeout` seconds.

    Keys are slash-separated segments of letters, digits and ``._=+@-``; a segment does not start with a dot.
    A *generation* is an opaque token for the content of a key at one moment, absence included.
    """

    def __init__(
        self, url: str, kvstore: ts.KvStore, *, timeout: float = 60.0, patience: Patience | None = None
    ) -> None:
        self.url = url
        self.timeout = timeout
        self._kvstore = kvstore
        self._patience = patience
        self._stopping_since: float | None = None

    @classmethod
    def open(cls, url: str, *, probe: bool = True, timeout: float = 60.0) -> Self:
        """Opens `url`: file:///absolute/directory, a plain path, gs://bucket/path, s3://bucket/path or memory://name.

        probe: write and delete one small key to prove conditional create and compare-and-swap. A reader
            without write permission passes False.
        Raises `StoreError`: unknown scheme, missing parent directory, no permission, or a store that accepts
        a second create or a stale swap.
        """
        normalised = _normalise(url)
        context = _CONTEXTS.get(urlsplit(normalised).scheme)
        try:
            kvstore = ts.KvStore.open(normalised, context=context).result(timeout=timeout)
        except Exception as error:
            raise StoreError(
                f"store {url}: cannot be opened: {error}. Check the url and the credentials of this host"
            ) from error
        store = cls(normalised, kvstore, timeout=timeout)
        if probe:
            store.prove()
        return store

    def patient(self, patience: Patience) -> Self:
        """The same store, whose calls wait for it while it is away. They raise `Interrupted` too."""
        return type(self)(self.url, self._kvstore, timeout=self.timeout, patience=patience)

    def prove(self) -> None:
        """Creates a probe key twice, swaps with a stale generation; `StoreError` if either is accepted."""
        key = f"probes/{uuid.uuid4().hex}"
        try:
            _, absent = self.read_with_generation(key)
            if not self.swap(key, b"first", absent):
                raise StoreError(
                    f"store {self.url}: refused to create the new key {key}, which no other program knows. "
                    "Its conditional writes do not work; use file://, gs:// or a store with If-None-Match"
                )
            _, first = self.read_with_generation(key)
            if self.create(key, b"second") or self.swap(key, b"second", absent):
                raise StoreError(
                    f"store {self.url}: created the existing key {key} again, so two trainers could both own "
                    "a run. Use a store that honours conditional writes (If-None-Match)"
                )
            if not self.swap(key, b"third", first):
                raise StoreError(
                    f"store {self.url}: refused a compare-and-swap of {key} with the current generation. Use "
                    "a store that honours conditional writes (If-Match)"
                )
            if self.swap(key, b"fourth", first):
                raise StoreError(
                    f"store {self.url}: accepted a compare-and-swap of {key} with a stale generation, so "
                    "updates could be lost. Use a store that honours conditional writes (If-Match)"
                )
            found = self.read(key)
            if found != b"third":
                raise StoreError(f"store {self.url}: {key} reads {found!r} after b'third' was written to it")
        finally:
            self.delete(key)

    def read(self, key: str) -> bytes | None:
        """The bytes at `key`, None if absent."""
        return self.read_with_generation(key)[0]

    def read_with_generation(self, key: str) -> tuple[bytes | None, bytes]:
        """(bytes or None, generation to pass to `swap`)."""
        result = self._call("read", key, lambda: self._kvstore.read(self._checked(key)))
        return (None if result.state == "missing" else result.value), result.stamp.generation

    def create(self, key: str, data: bytes) -> bool:
        """Writes `data` only if `key` is absent; False if it exists."""
        found, generation = self.read_with_generation(key)
        return found is None and self.swap(key, data, generation)

    def swap(self, key: str, data: bytes, generation: bytes) -> bool:
        """Writes `data` only if the content is still that of `generation`; False if it has changed."""
        if not generation:
            raise StoreError(
                f"store {self.url}: swap of {key} without a generation would be unconditional; "
                "pass the generation that read_with_generation returned"
            )
        return bool(self._write(key, data, generation))

    def put(self, key: str, data: bytes) -> None:
        """Writes `data` whatever was there. For keys with one writer."""
        self._write(key, data, None)

    def delete(self, key: str) -> None:
        """Removes `key`; absent is fine."""
        self._write(key, None, None)

    def list(self, prefix: str = "") -> list[str]:
        """All keys that start with `prefix`, sorted. Objects whose names are no keys of ours are left out."""
        if prefix:
            self._checked(prefix.rstrip("/"))
            upper = prefix[:-1] + chr(ord(prefix[-1]) + 1)
            keys = ts.KvStore.KeyRange(inclusive_min=prefix, exclusive_max=upper)
        else:
            keys = ts.KvStore.KeyRange()
        found = self._call("list", prefix, lambda: self._kvstore.list(keys))
        return sorted(key for key in map(_decoded, found) if _KEY.fullmatch(key))

    def read_json(self, key: str) -> Any | None:
        """The JSON value at `key`, None if absent. Raises `StoreError` if it is not JSON."""
        return self.read_json_with_generation(key)[0]

    def read_json_with_generation(self, key: str) -> tuple[Any | None, bytes]:
        """(JSON value or None, generation)."""
        data, generation = self.read_with_generation(key)
        if data is None:
            return None, generation
        try:
            return json.loads(data), generation
        except ValueError as error:
            raise StoreError(
                f"store {self.url}: {key} holds {data[:40]!r}..., expected JSON ({error}). "
                "Another program writes here, or the object is damaged; delete it if nothing needs it"
            ) from error

    def create_json(self, key: str, value: Any) -> bool:
        """`create` with `value` as JSON."""
        return self.create(key, to_json_bytes(value))

    def swap_json(self, key: str, value: Any, generation: bytes) -> bool:
        """`swap` with `value` as JSON."""
        return self.swap(key, to_json_bytes(value), generation)

    def put_json(self, key: str, value: Any) -> None:
        """`put` with `value` as JSON."""
        self.put(key, to_json_bytes(value))

    def _write(self, key: str, data: bytes | None, generation: bytes | None) -> bytes:
        """The one place that writes: None deletes; returns the new generation, empty if refused."""
        tries = 0

        def start() -> Any:
            nonlocal tries
            tries += 1
            return self._start_write(self._checked(key), data, generation)

        stamp = self._call("delete" if data is None else "write", key, start)
        if tries > 1 and not stamp.generation:
            # Refused when tried again: an earlier try may have arrived, with its answer lost.
            found, now = self.read_with_generation(key)
            return now if found == data else b""
        return stamp.generation

    def _start_write(self, key: str, data: bytes | None, generation: bytes | None) -> Any:
        """The future of one write. On a disk it holds the key's lock until it ends, also past a timeout."""
        if not self.url.startswith("file://"):
            return self._kvstore.write(key, data, if_equal=generation)
        sleep = time.sleep if self._patience is None else sleep_unless(self._ending)
        release = file_lock.acquire(self.url.removeprefix("file://"), key, timeout=self.timeout, sleep=sleep)
        try:
            future = self._kvstore.write(key, data, if_equal=generation)
        except BaseException:
            release()
            raise

        def done(_: ts.Future[Any]) -> None:
            release()
            _writing.pop(id(future), None)

        _writing[id(future)] = future
        future.add_done_callback(done)
        return future

    def _ending(self) -> bool:
        return self._patience is not None and self._stopping(self._patience)

    def _checked(self, key: str) -> str:
        if not _KEY.fullmatch(key) or key.endswith(".__lock"):
            raise StoreError(
                f"store {self.url}: {key!r} is not a key: expected segments of letters, digits and ._=+@- "
                "joined by /, none starting with a dot"
            )
        return key

    def _call(self, verb: str, key: str, start: Any) -> Any:
        patience = self._patience
        if patience is None:
            return self._try(verb, key, start)
        if self._stopping(patience):
            raise Interrupted
        away: StoreAway | None = None

        def look() -> tuple[Any] | None:
            nonlocal away
            try:
                return (self._try(verb, key, start),)
            except StoreAway as error:
                if away is None:
                    logger.warning("%s. Trying again for up to %g s", error, patience.seconds)
                away = error
                return None

        [result] = wait_for(
            look,
            lambda: f"store {self.url} to be back; the last error: {away}",
            timeout=patience.seconds,
            poll=RETRY_SECONDS,
            slowest=SLOWEST_RETRY_SECONDS,
            error=StoreError,
            sleep=sleep_unless(patience.interrupted),
        )
        if away is not None:
            logger.warning("store %s is back", self.url)
        return result

    def _stopping(self, patience: Patience) -> bool:
        """Whether the process has been stopping for longer than calls may still begin."""
        if not patience.interrupted():
            return False
        self._stopping_since = self._stopping_since or time.monotonic()
        return time.monotonic() - self._stopping_since > patience.grace

    def _result(self, future: Any) -> Any:
        """Of one call, within `timeout`; raises `Interrupted` soon after the process is stopping."""
        if self._patience is None:
            return future.result(timeout=self.timeout)
        for pause in looks(self.timeout, 0.5):
            try:
                return future.result(timeout=pause)
            except TimeoutError:
                if self._stopping(self._patience):
                    raise Interrupted from None
        raise TimeoutError

    def _try(self, verb: str, key: str, start: Any) -> Any:
        try:
            return self._result(start())
        except (StoreError, Interrupted):
            raise
        except TimeoutError as error:
            raise StoreAway(
                f"store {self.url}: {verb} of {key!r} did not finish in {self.timeout:g} s. Check the "
                "network, or open the store with a longer timeout"
            ) from error
        except Exception as error:
            raise StoreAway(
                f"store {self.url}: {verb} of {key!r} failed: {error}. Check that the location exists "
                "and that this process may use it"
            ) from error


def _decoded(name: bytes) -> str:
    return name.decode(errors="replace")  # a name that is not UTF-8 then matches no key


def to_json_bytes(value: Any) -> bytes:
    """Compact JSON with sorted keys: the same value is always the same bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _normalise(url: str) -> str:
    scheme = urlsplit(url).scheme if "://" in url else "file"
    if scheme not in SCHEMES:
        allowed = ", ".join(f"{name}://" for name in SCHEMES)
        raise StoreError(f"store {url}: scheme {scheme!r} is unknown; expected one of {allowed} or a path")
    if scheme != "file":
        return url.rstrip("/") + "/"
    path = url.removeprefix("file://")
    if not path or not os.path.isabs(path):
        if url.startswith("file://"):
            raise StoreError(f"store {url}: a file url needs an absolute path, as in file:///data/run")
        path = os.path.abspath(os.path.expanduser(path))
    path = os.path.normpath(path)
    parent = os.path.dirname(path)
    # In this order: another process may create the directory between any two looks.
    if os.path.exists(path) and not os.path.isdir(path):
        raise StoreError(f"store {url}: {path} is a file, expected a directory; choose another path")
    if not os.path.isdir(path):
        if not os.path.isdir(parent):
            raise StoreError(
                f"store {url}: its parent directory {parent} does not exist. Mount it or create it, "
                "then start again"
            )
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"store {url}: {path} cannot be created: {error}. Choose a writable place"
            ) from error
    return f"file://{path}/"
