"""What a mirror relies on after a loss of power: the order of writes, syncs and renames on a real disk.

Python's own calls are recorded and done: nothing is left out. What a crash of the machine may lose is
everything after the last sync of a file, and every rename after the last sync of its directory (fsync(2)).
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.rollout_bridge.weights import chains, tiny

DELTA = [
    ("sync", "journal.bin.tmp"),
    ("rename", "journal.bin"),
    ("sync", "."),
    ("sync", "tensors.bin"),
    ("sync", "version.json.tmp"),
    ("rename", "version.json"),
    ("sync", "."),
    ("remove", "journal.bin"),
    ("sync", "."),
]
FULL = [
    ("sync", "tensors.new.bin"),
    ("sync", "version.new.json.tmp"),
    ("rename", "version.new.json"),
    ("sync", "."),
    ("rename", "tensors.bin"),
    ("rename", "version.json"),
    ("sync", "."),
]


@dataclass(frozen=True)
class Event:
    """What was done to `name` ("." is the directory). content: of that file then; tensors: of tensors.bin."""

    verb: str
    name: str
    content: bytes
    tensors: bytes


@pytest.fixture
def events(tmp_path, monkeypatch) -> list[Event]:
    """Syncs, renames and removals in the directory "mirror", in order."""
    directory = tmp_path / "mirror"
    seen: list[Event] = []
    fsync, replace, unlink, flush = os.fsync, os.replace, Path.unlink, np.memmap.flush

    def content(path: Path) -> bytes:
        return path.read_bytes() if path.is_file() else b""

    def note(verb: str, path: Path) -> None:
        if directory in (path, path.parent):
            name = str(path.relative_to(directory)).replace(f".{os.getpid()}.", ".")  # of temporary files
            seen.append(Event(verb, name, content(path), content(directory / "tensors.bin")))

    def noted_fsync(descriptor):
        fsync(descriptor)
        note("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def noted_replace(source, target):
        replace(source, target)
        note("rename", Path(target))

    def noted_unlink(path, missing_ok=False):
        if path.exists():
            note("remove", path)
        unlink(path, missing_ok=missing_ok)

    def noted_flush(array):
        flush(array)
        note("sync", Path(array.filename))

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    monkeypatch.setattr(Path, "unlink", noted_unlink)
    monkeypatch.setattr(np.memmap, "flush", noted_flush)
    return seen


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the names of open files come from /proc")
@pytest.mark.parametrize("order", [DELTA, FULL], ids=["delta", "full"])
def test_what_a_mirror_would_recover_from_is_on_disk_before_it_is_needed(order, events, tmp_path):
    """A journal before a bit changes, the bits before the version that names them, both before it goes."""
    store = tiny.open_store(tmp_path.name)
    chains.chain_of(store, 3, full_every=2).close()  # 1 and 3 are full
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance(1)
    reader.mirror.close()
    reader = tiny.subscriber(store, tmp_path / "mirror")  # that has read no manifest yet
    tensors = tmp_path / "mirror" / "tensors.bin"
    before = tensors.read_bytes()
    events.clear()
    with chains.hidden(store, 2) if order is FULL else contextlib.nullcontext():
        assert reader.advance(3 if order is FULL else 2) is not None
    assert [(event.verb, event.name) for event in events] == order
    after = tensors.read_bytes()
    assert before != after
    recovery, bits = "journal.bin", "tensors.bin"
    if order is FULL:
        recovery, bits = "version.new.json", "tensors.new.bin"
    named = order.index(("rename", recovery)) + 1  # by this sync its name is on disk
    assert all(event.tensors == before for event in events[: named + 1])
    synced = {event.name: event.content for event in events if event.verb == "sync"}
    assert synced[bits] == after
    renamed = {event.name: event.content for event in events if event.verb == "rename"}
    for temporary in [name for name in synced if name.endswith(".tmp")]:
        assert synced[temporary] == renamed[temporary.removesuffix(".tmp")] != b""
