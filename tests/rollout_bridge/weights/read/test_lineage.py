"""A copied or restored store goes on with the same numbers and other weights: a reader follows the store.

The oracle is the tree that each store's trainer published.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rollout_bridge.store import Store
from rollout_bridge.weights.format import run as runs
from rollout_bridge.weights.format.manifest import LATEST_KEY
from rollout_bridge.weights.read.mirror import Mirror
from tests.rollout_bridge.weights import chains, tiny

OTHERS = [tiny.step(chains.TREES[2], 100 + number) for number in range(6)]  # the copy's version 3 + number


def copied(tmp_path: Path, *, last: int, full_every: int = 100) -> tuple[Store, Store]:
    """A store that goes on to version 5, and its copy, made at version 2, whose trainer goes on to `last`."""
    original = tiny.open_store(f"{tmp_path}/original")
    chains.chain_of(original, 2).close()
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    chains.chain_of(original, 5, full_every=full_every).close()
    copy = Store.open(f"{tmp_path}/copy")
    trainer = tiny.publisher(copy, full_every=full_every)
    trainer.take_over()
    for number in range(last - 2):
        trainer.publish(tiny.on_device(OTHERS[number]), step=3 + number).result(300)
    trainer.close()
    return original, copy


@pytest.mark.parametrize("full_every", [2, 100], ids=["full-versions", "deltas"])
@pytest.mark.parametrize("last", [3, 4, 5, 6])
@pytest.mark.parametrize("renew", [False, True])
def test_a_reader_pointed_at_a_copy_holds_what_the_copy_published(last, full_every, renew, tmp_path):
    """Both trainers are incarnation 2 of one run, so neither run, number nor incarnation says which it is."""
    original, copy = copied(tmp_path, last=last, full_every=full_every)
    reader = tiny.subscriber(original, tmp_path / "mirror")
    assert reader.advance() is not None and reader.mirror.version == 5
    reader.mirror.close()
    moved = tiny.subscriber(copy, tmp_path / "mirror")
    update = moved.renew() if renew else moved.advance()
    assert update is not None and (update.version, update.changed) == (last, moved.mirror.view.specs.keys())
    tiny.assert_holds(moved, OTHERS[last - 3])
    assert moved.advance() is None and not moved.broken


@pytest.mark.parametrize("pinned", [4, 5])
def test_a_pinned_version_is_that_of_the_copy(pinned, tmp_path):
    original, copy = copied(tmp_path, last=7)
    reader = tiny.subscriber(original, tmp_path / "mirror")
    assert reader.advance() is not None and reader.mirror.version == 5
    reader.mirror.close()
    moved = tiny.subscriber(copy, tmp_path / "mirror")
    assert moved.advance(pinned) is not None and moved.mirror.version == pinned
    tiny.assert_holds(moved, OTHERS[pinned - 3])


def test_a_store_restored_from_a_backup_takes_its_readers_back(tmp_path):
    """Until its trainer has published anything new too: version 5 no longer exists."""
    original, copy = copied(tmp_path, last=2)
    reader = tiny.subscriber(original, tmp_path / "mirror")
    reader.advance()
    reader.mirror.close()
    moved = tiny.subscriber(copy, tmp_path / "mirror")
    update = moved.advance()
    assert update is not None and update.version == 2
    tiny.assert_holds(moved, chains.TREES[2])


def test_no_engine_is_given_the_old_version_while_the_copy_is_out_of_reach(tmp_path):
    original, copy = copied(tmp_path, last=5)
    reader = tiny.subscriber(original, tmp_path / "mirror")
    reader.advance()
    reader.mirror.close()
    for version in range(1, 6):
        for key in chains.keys_of(copy, version, ".blob"):
            copy.delete(key)
    moved = tiny.subscriber(copy, tmp_path / "mirror", attempts=1)
    with pytest.raises(ValueError, match="version 1 "):
        moved.renew()
    assert moved.mirror.version is None


def test_a_stale_head_moves_nobody_back_however_old(tmp_path):
    """The mirror stays as it is, byte for byte, and goes on when the head is right again."""
    store = tiny.open_store(tmp_path.name)
    trainer = chains.chain_of(store, 1)
    heads = [store.read(LATEST_KEY)]
    for number in range(2, 6):
        chains.publish(trainer, number)
        heads.append(store.read(LATEST_KEY))
    trainer.close()
    reader = tiny.subscriber(store, tmp_path / "mirror")
    assert reader.advance(4) is not None
    for head in heads[:4]:
        assert head is not None
        store.put(LATEST_KEY, head)
        assert reader.advance() is None and reader.mirror.version == 4
    assert heads[4] is not None
    store.put(LATEST_KEY, heads[4])
    update = reader.advance()
    assert update is not None and update.version == 5
    tiny.assert_holds(reader, chains.TREES[5])


def test_directories_of_two_chains_have_different_names(tmp_path):
    """An engine would otherwise load the other chain's version 3, or none."""
    original, copy = copied(tmp_path, last=3)
    names = set()
    for store in (original, copy):
        reader = tiny.subscriber(store, tmp_path / f"mirror-{len(names)}")
        reader.advance(3)
        names.add(reader.mirror.materialize(tmp_path / "engine", "bf16").name)
    assert len(names) == 2 and {name[:15] for name in names} == {"00000003-000002"}


def test_a_mirror_of_another_tokenizer_is_emptied(tmp_path):
    run = tiny.new_run()
    other = runs.RunInfo(run.run_id, run.hf_config, run.plan, {"tokenizer.json": '{"version": "1.1"}'})
    store = tiny.open_store(tmp_path.name)
    joined = runs.load(store)
    assert joined is not None
    chains.chain_of(store, 1).close()
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    reader.mirror.close()
    mirror = Mirror(tmp_path / "mirror")
    mirror.bind(runs.RunInfo(joined.run_id, joined.hf_config, joined.plan, other.tokenizer))
    assert mirror.version is None
