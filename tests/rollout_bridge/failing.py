"""Stores and disks of which one write fails once, and everything else goes on."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from rollout_bridge.store import Store, StoreError


class FailsOnce(Store):
    """Any store but for one write: it raises `StoreError`, before the write reaches the store or after.

    keys: of the writes counted so far, those under `prefix` since the last `arm`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._counting = threading.Lock()
        self.arm(None)

    def arm(self, number: int | None, *, arrives: bool = False, prefix: str = "") -> None:
        """Counts anew: write `number` (from 0) of a key under `prefix` fails; None: none does.

        arrives: the store takes it and only the answer is lost, as when a call runs into its timeout.
        """
        self._number, self._arrives, self._prefix = number, arrives, prefix
        self.keys: list[str] = []

    def _write(self, key: str, data: bytes | None, generation: bytes | None) -> bytes:
        with self._counting:
            fails = key.startswith(self._prefix) and len(self.keys) == self._number
            if key.startswith(self._prefix):
                self.keys.append(key)
        if fails and not self._arrives:
            raise StoreError(f"store {self.url}: write of {key!r} failed: injected")
        stamp = super()._write(key, data, generation)
        if fails:
            raise StoreError(f"store {self.url}: write of {key!r} did not finish: injected")
        return stamp


class Renames:
    """`os.replace`, by which every file of a mirror appears, but for call `at` (from 0): it raises `OSError`.

    names: of the files so far. arrives: the file appears, and the error comes after.
    """

    def __init__(self, at: int | None = None, *, arrives: bool = False) -> None:
        self.at, self.arrives = at, arrives
        self.names: list[str] = []
        self._replace = os.replace

    def __call__(self, source: str | Path, target: str | Path) -> None:
        fails = len(self.names) == self.at
        self.names.append(Path(target).name)
        if not fails or self.arrives:
            self._replace(source, target)
        if fails:
            raise OSError(28, "No space left on device", str(target))
