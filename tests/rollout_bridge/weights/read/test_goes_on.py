"""One file of a mirror is not moved into place, once: the same reader goes on, and loses nothing."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from rollout_bridge.store import Store
from rollout_bridge.weights.format.manifest import QUARANTINE_PREFIX
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.mirror_view import TENSORS
from rollout_bridge.weights.read.subscriber import Subscriber
from tests.rollout_bridge.failing import Renames
from tests.rollout_bridge.weights import chains, tiny

# The version a reader holds, the one it moves to while a file fails, and the broken versions.
MOVES = {
    "first-version": (0, 1, ()),
    "delta": (3, 4, ()),
    "delta-in-parts": (3, 4, ()),
    "full-version": (1, 3, (2,)),
}


@functools.cache
def published(broken: tuple[int, ...]) -> Store:
    """Versions 1 to 7, all deltas but for the first, and for those that pass a broken one by."""
    store = tiny.open_store(f"mirror-goes-on-{len(broken)}")
    trainer = chains.chain_of(store, 1)
    for number in range(2, 8):
        chains.publish(trainer, number)
        if number in broken:
            (blob,) = chains.keys_of(store, number, ".blob")
            chains.damage(store, number, "missing blob")
            store.put_json(f"{QUARANTINE_PREFIX}{number:08d}-000001.json", {"what": blob})
    trainer.close()
    return store


def close(reader: Subscriber) -> None:
    reader.close()
    reader.mirror.close()


def reader_of(move: str, directory: Path) -> Subscriber:
    held, _, broken = MOVES[move]
    if held:
        reader = tiny.subscriber(published(broken), directory)
        reader.advance(held)
        close(reader)
    reader = tiny.subscriber(published(broken), directory, decoders=1)
    if move == "delta-in-parts":
        vars(reader)["_here"] = lambda places: False  # as large models are, but by this process
    return reader


@functools.cache
def files_of(move: str) -> tuple[str, ...]:
    """The files that appear in that move, in order, where none fails."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        reader, renames = reader_of(move, Path(directory)), Renames()
        patch.setattr(os, "replace", renames)
        reader.advance(MOVES[move][1])
        close(reader)
    return tuple(renames.names)


@pytest.mark.parametrize("arrives", [False, True], ids=["not-moved", "moved"])
@pytest.mark.parametrize("move", MOVES)
def test_a_reader_goes_on_after_any_one_file_that_failed(
    move: str,
    arrives: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    held, target, broken = MOVES[move]
    files = files_of(move)
    assert "version.json" in files
    for at, name in enumerate(files):
        reader, renames = reader_of(move, tmp_path / name), Renames(at, arrives=arrives)
        monkeypatch.setattr(os, "replace", renames)
        with pytest.raises(OSError, match="No space left"):
            reader.advance(target)
        monkeypatch.undo()
        assert renames.names == [*files[: at + 1]]
        shutil.copytree(tmp_path / name, tmp_path / f"{name}-left")
        left = Mirror(
            tmp_path / f"{name}-left"
        )  # a restart now finds a whole version, the one before or after
        assert left.version in (held or None, target) and (left.version is None or left.verify())
        left.close()
        after = Renames()
        monkeypatch.setattr(os, "replace", after)
        for number in range(target, target + 4):
            update = reader.advance(number)
            # The move that failed may have been finished first; then nothing is newer.
            assert update is not None or number == target
            assert reader.mirror.version == number and reader.mirror.verify()
            tiny.assert_holds(reader, chains.TREES[number])
        assert [ref.version for ref in reader.broken] == [*broken], "no good version is called broken"
        assert "emptied" not in caplog.text
        assert TENSORS in files or TENSORS not in after.names, "nothing that was held is fetched again"
        monkeypatch.undo()
        close(reader)
        again = Mirror(tmp_path / name)  # a restart finds the same
        assert again.version == target + 3 and again.verify()
        again.close()
    assert len(published(broken).list(QUARANTINE_PREFIX)) == len(broken)
