"""One file of a mirror is not moved into place, once: the same reader goes on, and loses nothing."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from rollout_bridge.store import Store
from rollout_bridge.weights.manifest import QUARANTINE_PREFIX
from rollout_bridge.weights.mirror import Mirror
from rollout_bridge.weights.subscriber import Subscriber
from tests.rollout_bridge.weights import chains, tiny

# The version a reader holds, the one it moves to while a file fails, how it decodes, and the broken versions.
MOVES = {
    "first version": (0, 1, {}, ()),
    "delta": (3, 4, {}, ()),
    "delta in parts": (3, 4, {"decoders": 2, "inline_bytes": 0}, ()),
    "full version": (1, 3, {}, (2,)),
}


@functools.cache
def published(broken: tuple[int, ...]) -> Store:
    """Versions 1 to 7, all deltas but for the first, and for those that pass a broken one by."""
    store = tiny.open_store(f"mirror-goes-on-{len(broken)}")
    trainer = chains.chain_of(store, 1)
    for number in range(2, 8):
        chains.publish(trainer, number)
        if number in broken:
            chains.damage(store, number, "missing blob")
            store.put_json(f"{QUARANTINE_PREFIX}{number:08d}-000001.json", {})
    trainer.close()
    return store


class Renames:
    """`os.replace`, by which every file of a mirror appears; that `number` `at` fails once."""

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


def close(reader: Subscriber) -> None:
    reader.close()
    reader.mirror.close()


@pytest.mark.parametrize("arrives", [False, True], ids=["not moved", "moved"])
@pytest.mark.parametrize("move", MOVES)
def test_a_reader_goes_on_after_any_one_file_that_failed(
    move: str, arrives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, target, options, broken = MOVES[move]
    store = published(broken)

    def reader_at_held(name: str, renames: Renames) -> Subscriber:
        reader = tiny.subscriber(store, tmp_path / name, **options)
        if held:
            reader.advance(held)
        monkeypatch.setattr(os, "replace", renames)
        return reader

    counted = Renames()
    reader = reader_at_held("counted", counted)
    reader.advance(target)
    monkeypatch.undo()
    close(reader)
    assert "version.json" in counted.names
    for at, name in enumerate(counted.names):
        renames = Renames(at, arrives=arrives)
        reader = reader_at_held(name, renames)
        with pytest.raises(OSError, match="No space left"):
            reader.advance(target)
        monkeypatch.undo()
        assert renames.names == counted.names[: at + 1]
        for number in range(target, target + 4):
            update = reader.advance(number)
            # The move that failed may have been finished first; then nothing is newer.
            assert update is not None or number == target
            assert reader.mirror.version == number and reader.mirror.verify()
            tiny.assert_holds(reader, chains.TREES[number])
        assert [ref.version for ref in reader.broken] == [*broken], "no good version is called broken"
        close(reader)
        again = Mirror(tmp_path / name)  # a restart finds the same
        assert again.version == target + 3 and again.verify()
        again.close()
    assert len(store.list(QUARANTINE_PREFIX)) == len(broken)
