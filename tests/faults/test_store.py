"""What a store or a disk can do to a host: damage, loss, stale and foreign objects, NaN, no space.

The agent is stopped (SIGSTOP) while a version is published and damaged, so that it sees nothing else. Clients
check every token all the time.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from rollout_bridge.quantization import digest
from rollout_bridge.store import Store
from rollout_bridge.weights.format import chain
from rollout_bridge.weights.format.manifest import LATEST_KEY, QUARANTINE_PREFIX, BrokenVersion
from rollout_bridge.weights.write.encoder import Patch
from rollout_bridge.weights.write.garbage import Retention, collect
from rollout_bridge.weights.write.publisher import WriterSettings
from rollout_bridge.weights.write.writer import ChainWriter
from tests.faults.fleet import Host, until
from tests.rollout_bridge.weights import tiny
from tests.rollout_bridge.weights.chains import DAMAGES, damage
from tests.running import stopped


@contextmanager
def agent_stopped(host: Host) -> Iterator[None]:
    assert host.agent is not None
    host.agent.send_signal(signal.SIGSTOP)
    until("stop", lambda: stopped(host.agent.pid))
    try:
        yield
    finally:
        host.agent.send_signal(signal.SIGCONT)


def check(host: Host, what: str, record) -> None:
    before = host.ack()
    with agent_stopped(host):
        version = host.publish()
        damage(host.store, version, what)
    place = f"{QUARANTINE_PREFIX}{version:08d}-000001.json"
    record_of = until("quarantine", lambda: host.store.read_json(place))
    # The agent looks once more before it says that nothing newer can be had: it must not find the next yet.
    until("error", lambda: f"version {version}" in host.ack()["last_error"])
    assert host.tokens.get(version, 0) == 0
    following = host.publish()  # what is quarantined makes it a full one
    ack = host.until_served(following)
    assert ack["errors"] > before["errors"]
    assert ack["fallbacks"] == before["fallbacks"] + 1
    record("outcome", f"{version} never served: {record_of['reason'][:60]}; {following} full, served")


@pytest.mark.parametrize("what", ["flipped bit in a blob"])
def test_a_damaged_version_is_never_served_and_the_next_is(host, what, record_property):
    check(host, what, record_property)


@pytest.mark.faults
@pytest.mark.parametrize("what", [what for what in DAMAGES if what != "flipped bit in a blob"])
def test_whatever_the_damage(host, what, record_property):
    check(host, what, record_property)


@pytest.mark.faults
def test_a_stale_pointer_moves_nobody_back(host, record_property):
    stale = host.store.read(LATEST_KEY)
    version = host.publish()
    host.until_served(version)
    current = host.store.read(LATEST_KEY)
    host.store.put(LATEST_KEY, stale)
    time = host.ack()["time"]
    until("two heartbeats", lambda: host.ack()["time"] > time + 0.7)
    assert host.ack()["version"] == version
    host.store.put(LATEST_KEY, current)
    host.until_served(host.publish())
    record_property("outcome", f"{version} stays served; the chain goes on")


@pytest.mark.faults
def test_a_full_disk_stops_updates_and_nothing_else(host, record_property):
    """The agent's files may not grow past 4 kB for a while: a journal does not fit."""
    assert host.agent is not None
    before = host.ack()
    limits = resource.prlimit(host.agent.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(host.agent.pid, resource.RLIMIT_FSIZE, (4096, limits[1]))
    version = host.publish(tiny.step(host.trees[host.trainer.head.version], 99, size=1e-2))
    ack = until("two errors", lambda: a if (a := host.ack())["errors"] >= before["errors"] + 2 else None)
    assert "File too large" in ack["last_error"] and host.tokens.get(version, 0) == 0
    resource.prlimit(host.agent.pid, resource.RLIMIT_FSIZE, limits)
    ack = host.until_served(version)
    errors = ack["errors"] - before["errors"]
    record_property("outcome", f"old version served, {errors} errors; then {version}")


def nan_version(store: Store, name: str, bits: int) -> None:
    """A version that a broken trainer made: one element of `name` is `bits`, and every digest agrees."""
    run = tiny.runs.load(store)
    latest = chain.read_latest(store)
    assert run is not None and latest is not None
    writer = ChainWriter(store, run, WriterSettings(), full_every=100)
    writer.join(latest)
    assert writer.replayed is not None
    old = np.array(writer.replayed.tensor(name))
    writer.rebase([(name, Patch(name=name, shape=old.shape, rectangle=_all(old), values=old))])
    change = Patch(
        name=name,
        shape=old.shape,
        rectangle=_all(old),
        values=np.array([bits], old.dtype),
        indices=np.array([0]),
        old=old.reshape(-1)[:1],
        before=old,
    )
    begin = writer.begin("1-1", can_delta=True)
    part = writer.write(begin, full=None, change=[(name, change)])
    manifest = writer.commit(
        part, begin, patches=[(name, change)], step=99, update_rms=None, durable=lambda: None
    )
    new = old.copy()
    new.reshape(-1)[0] = bits
    assert manifest.tensors[name].digest_value == digest.digest(new)


def _all(array: np.ndarray) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in array.shape)


EXPERT = "model.layers.1.mlp.experts.0.up_proj.weight"
NOT_NUMBERS = {
    EXPERT: 0xFF,
    f"{EXPERT}_scale_inv": 0x7FC00000,
    "model.norm.weight": 0x7F80,
}


@pytest.mark.parametrize("name", NOT_NUMBERS)
def test_nan_in_codes_scales_or_weights_never_reaches_an_engine(name, tmp_path, record_property):
    store = tiny.open_store(tmp_path.name)
    trainer = tiny.publisher(store)
    trainer.take_over()
    trainer.publish(tiny.on_device(tiny.params()), step=1).result(300)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    nan_version(store, name, NOT_NUMBERS[name])
    with pytest.raises(BrokenVersion, match="version 2"):
        reader.advance()
    assert f"tensor {name}: 1 of its new values are NaN or infinite" in next(iter(reader.broken.values()))
    tiny.assert_holds(reader, tiny.params())
    record_property("outcome", "quarantined; version 1 stays")


def chain_of(store: Store, versions: int, **options):
    trainer = tiny.publisher(store, **options)
    trainer.take_over()
    tree = tiny.params()
    for number in range(1, versions + 1):
        tree = tiny.step(tree, number, size=1e-6, paths_changed=0.3)
        trainer.publish(tiny.on_device(tree), step=number).result(300)
    return trainer, tree


@pytest.mark.faults
def test_a_reader_fifty_versions_behind_takes_them_as_one_update(tmp_path, record_property):
    store = tiny.open_store(tmp_path.name)
    trainer, _ = chain_of(store, 1, full_every=20)
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    tree = tiny.params()
    for number in range(2, 52):
        tree = tiny.step(tree, number, size=1e-6, paths_changed=0.3)
        trainer.publish(tiny.on_device(tree), step=number).result(300)
    update = reader.advance()
    assert update is not None and update.version == 51 and reader.fallbacks == 0
    tiny.assert_holds(reader, tree)
    trainer.close()
    record_property("outcome", f"1 to 51 in one update of {len(update.changed)} tensors")


@pytest.mark.parametrize("moment", ["manifest.json", ".blob"])
def test_a_chain_pruned_under_a_reader_leads_it_to_the_newest_full_version(moment, tmp_path, record_property):
    """The removal runs between two reads of one update of the reader."""

    class Pruned(Store):
        armed = False

        def read(self, key):
            if self.armed and key.endswith(moment) and "/00000003/" in key:
                self.armed = False
                assert collect(self, retention=Retention(versions=0, seconds=0.0)).oldest_kept == 6
            return super().read(key)

    tiny.open_store(tmp_path.name)
    store = Pruned.open(f"memory://{tmp_path.name}")
    trainer, tree = chain_of(store, 7, full_every=5)  # 1 and 6 are full
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance(2)
    reader.mirror.close()
    reader = tiny.subscriber(store, tmp_path / "mirror")  # one that has read no manifest yet
    store.armed = True
    update = reader.advance()
    assert not store.armed and update is not None and update.version == 7
    tiny.assert_holds(reader, tree)
    trainer.close()
    record_property("outcome", f"version 7 by way of 6, {len(reader.broken)} quarantined")
