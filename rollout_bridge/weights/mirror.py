"""The canonical tensors of one version on a host's disk, moved from version to version without a torn state.

Invariants, whatever moment the process dies at:
- after opening, the mirror is exactly one version, the one before or the one after an interrupted change;
- a delta is journalled whole (absolute values) and synced before the first byte of `tensors.bin` changes;
  a journal in parts counts when the list of them is there;
- a full version is written beside the old one and renamed over it;
- `version.json` moves after the bits are on disk, and the journal goes after `version.json`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rollout_bridge import files
from rollout_bridge.weights import journal, materialize, mirror_view, parts
from rollout_bridge.weights.journal import Change
from rollout_bridge.weights.mirror_view import MirrorError, MirrorState, MirrorView
from rollout_bridge.weights.parts import Part, Setting
from rollout_bridge.weights.run import RunInfo

logger = logging.getLogger(__name__)

_LOCK, _JOURNAL = "lock", "journal.bin"
_NEW_TENSORS, _NEW_VERSION = "tensors.new.bin", "version.new.json"

Spread = Callable[[Callable[[Any], None], list[Any]], None]


def one_by_one(work: Callable[[Any], None], items: list[Any]) -> None:
    """The `Spread` of a process by itself."""
    for item in items:
        work(item)


class Mirror:
    """Owner of a mirror directory: one process at a time. Others read it through `MirrorView`."""

    def __init__(self, directory: str | Path) -> None:
        """Opens or creates the directory and finishes what a crash interrupted.

        Raises `MirrorError` if another process owns it.
        """
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.directory / _LOCK, "a+b")  # noqa: SIM115 - held until close()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise MirrorError(
                f"mirror {self.directory}: another process owns it. Stop that sync agent, or give this one "
                "a directory of its own"
            ) from error
        self._view: MirrorView | None = None
        self._spread: Spread = one_by_one
        self._recover()

    @property
    def view(self) -> MirrorView:
        """The current version. Raises `MirrorError` if there is none."""
        if self._view is None:
            raise MirrorError(f"mirror {self.directory}: holds no version yet")
        return self._view

    @property
    def state(self) -> MirrorState | None:
        """Which version is held, None before the first."""
        return self._view.state if self._view else None

    @property
    def version(self) -> int | None:
        return self._view.version if self._view else None

    def tensor(self, name: str) -> np.ndarray:
        """Canonical bits of `name`, read-only; a view that later versions change in place."""
        return self.view.tensor(name)

    def verify(self) -> int:
        """Recomputes every digest; the number of tensors. Raises `MirrorError` naming a damaged one."""
        return self.view.verify()

    def materialize(self, directory: str | Path, engine_format: materialize.EngineFormat) -> Path:
        """A Hugging Face directory of the current version below `directory`; see `materialize`."""
        return materialize.materialize(self.view, Path(directory), engine_format)

    def bind(self, run: RunInfo) -> None:
        """Says which run the mirror is of. One of another run or model is emptied."""
        path = self.directory / mirror_view.RUN
        if path.exists():
            held = json.loads(path.read_bytes())
            if held.get("run_id") == run.run_id and held.get("fingerprint") == run.fingerprint:
                return
            logger.warning(
                "mirror %s: was of run %s, now of %s; emptied", self.directory, held.get("run_id"), run.run_id
            )
        self.reset()
        files.write_whole(
            self.directory / mirror_view.INDEX, json.dumps(mirror_view.index_json(run.tensors)), durable=True
        )
        files.write_whole(path, json.dumps(run.to_json()), durable=True)

    def reset(self) -> None:
        """Forgets the version held. `version.json` goes first, so no half-removed version is ever read."""
        self._view = None
        for name in (mirror_view.VERSION, _NEW_VERSION, _JOURNAL, _NEW_TENSORS, mirror_view.TENSORS):
            (self.directory / name).unlink(missing_ok=True)
        parts.remove(self.directory)
        files.sync_directory(self.directory)

    def replace(self, run: RunInfo, state: MirrorState, fill: Callable[[Path], None]) -> None:
        """Moves to a full version: `fill(file)` writes every tensor to its place (`mirror_view.layout`).

        The old version stays whole until `fill` has returned and the new bits are on disk; an exception of
        `fill` leaves it.
        """
        _, size = mirror_view.layout(run.tensors)
        path = self.directory / _NEW_TENSORS
        try:
            with open(path, "wb") as file:
                # Blocks now: a page of a sparse file that finds the disk full ends the process (SIGBUS).
                os.posix_fallocate(file.fileno(), 0, size)
            fill(path)
            np.memmap(path, mode="r+", dtype=np.uint8).flush()
        except Exception:
            path.unlink(missing_ok=True)
            raise
        files.write_whole(self.directory / _NEW_VERSION, json.dumps(state.to_json()), durable=True)
        self._redo_replace()

    def apply(self, state: MirrorState, changes: Iterable[Change]) -> None:
        """Moves to the version of `state` by setting elements: journal, then bits, then version."""
        _ = self.view
        journal.write(self.directory / _JOURNAL, state.to_json(), changes)
        self._redo_journal()

    def apply_parts(self, state: MirrorState, written: Iterable[Part], spread: Spread) -> None:
        """`apply`, of a journal whose parts are being `written` by others, in this directory.

        spread: does `work` for each item of a list, anywhere on this host.
        """
        _ = self.view
        try:
            listed = [[part.path.name, part.hash] for part in written]
            files.sync_directory(self.directory)
            journal.write(self.directory / _JOURNAL, state.to_json() | {"parts": listed}, ())
        except Exception:
            parts.remove(self.directory)
            raise
        self._spread = spread
        self._redo_journal()

    def close(self) -> None:
        """Lets another process own the directory. The bits stay."""
        self._view = None
        self._lock.close()

    def _recover(self) -> None:
        for path in self.directory.glob("*.tmp"):
            path.unlink()
        if not (self.directory / _JOURNAL).exists():
            parts.remove(self.directory)  # of an update that never came to its journal
        if (self.directory / _NEW_VERSION).exists():
            logger.warning("mirror %s: finishing an interrupted full version", self.directory)
            self._redo_replace()
        else:
            (self.directory / _NEW_TENSORS).unlink(missing_ok=True)
            self._open()
        if (self.directory / _JOURNAL).exists():
            logger.warning("mirror %s: finishing an interrupted update", self.directory)
            try:
                self._redo_journal()
            except journal.JournalError as error:
                # The bits may be half changed, and what would complete them is lost.
                logger.error("mirror %s: emptied: %s", self.directory, error)
                self.reset()

    def _redo_replace(self) -> None:
        new = self.directory / _NEW_TENSORS
        (self.directory / _JOURNAL).unlink(missing_ok=True)
        if new.exists():
            os.replace(new, self.directory / mirror_view.TENSORS)
        os.replace(self.directory / _NEW_VERSION, self.directory / mirror_view.VERSION)
        files.sync_directory(self.directory)
        self._open()

    def _redo_journal(self) -> None:
        if self._view is None:
            raise journal.JournalError(f"{self.directory / _JOURNAL}: belongs to a version that is not there")
        state, changes = journal.read(self.directory / _JOURNAL)
        pieces = [Part(self.directory / name, found) for name, found in state.pop("parts", ())]
        spread, self._spread = self._spread, one_by_one
        spread(parts.check, pieces)  # all of them, before the first bit changes
        spread(parts.set_bits, [Setting(piece, self.directory / mirror_view.TENSORS) for piece in pieces])
        for change in changes:
            self._view.writable(change.name).reshape(-1)[change.indices] = change.values
        data = self._view.data
        assert isinstance(data, np.memmap)
        data.flush()
        files.write_whole(self.directory / mirror_view.VERSION, json.dumps(state), durable=True)
        (self.directory / _JOURNAL).unlink()
        files.sync_directory(self.directory)
        parts.remove(self.directory)
        self._open()

    def _open(self) -> None:
        self._view = None
        if not (self.directory / mirror_view.VERSION).exists():
            return
        try:
            self._view = mirror_view.open_view(self.directory, writable=True)
        except MirrorError as error:
            logger.error("%s", error)
            self.reset()
