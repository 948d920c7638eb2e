"""The agent's loop against an engine that records what it is given."""

import asyncio
import json
import os
import threading
import time

import numpy as np
import pytest

from rollout_bridge.agent import AgentError, AgentSettings, SyncAgent, agent_name
from rollout_bridge.control import ACKS_PREFIX, EVALUATIONS_PREFIX, EvaluationClaim, EvaluationRequest
from rollout_bridge.engines.protocol import EngineError, UpdateReport
from rollout_bridge.quantization import digest
from rollout_bridge.store import Store
from rollout_bridge.waiting import Unchanged
from rollout_bridge.weights.format import chain
from rollout_bridge.weights.format.manifest import QUARANTINE_PREFIX
from rollout_bridge.weights.format.pins import pins_of
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.mirror_view import MirrorError
from tests.rollout_bridge.failing import FailsOnce, Renames
from tests.rollout_bridge.weights import tiny

TREES = [tiny.params()]
for _number in range(1, 6):
    TREES.append(tiny.step(TREES[-1], _number))
QUICK = AgentSettings(poll=0.01, heartbeat=0.02, patience=300.0, retry=0.01)


class Engine:
    """Holds a copy of every tensor it was given; fails the updates of `failures` (number of the call)."""

    name = "recording engine"

    def __init__(self, failures=()):
        self.tensors = {}
        self.served = None
        self.versions = []
        self.calls = 0
        self.failures = set(failures)
        self.on_update = lambda version: None

    async def update(self, update):
        self.calls += 1
        for position, name in enumerate(sorted(update.changed)):
            if self.calls in self.failures and position == 3:
                raise EngineError(f"{self.name}: out of memory")
            self.tensors[name] = np.array(update.tensor(name))
        self.served = update.version
        self.versions.append(update.version)
        self.on_update(update.version)
        return UpdateReport(version=update.version, pause_ms=1.5, total_ms=2.0, tensors=len(update.changed))

    async def version(self):
        return self.served


def publisher(store):
    trainer = tiny.publisher(store)
    trainer.take_over()
    return trainer


def publish(trainer, number):
    trainer.publish(tiny.on_device(TREES[number]), step=number).result(300)


def finish(store):
    store.put_json(
        "control/state.json", {"phase": "finished", "step": 0, "rl_step": 0, "version": 0, "time": 0.0}
    )


def run(agent, timeout=300):
    asyncio.run(asyncio.wait_for(agent.run(), timeout))


def ack(store, agent="a"):
    return store.read_json(f"{ACKS_PREFIX}{agent}.json")


def assert_serves(engine, store, tree, tmp_path):
    run = tiny.subscriber(store, tmp_path / "checker").join()
    expected = tiny.canonical(run, tree)
    assert engine.tensors.keys() == expected.keys()
    for name, bits in expected.items():
        np.testing.assert_array_equal(engine.tensors[name], bits)


def test_the_engine_follows_the_chain_and_every_tensor_is_the_manifests(tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = publisher(store)
    publish(trainer, 1)
    engine = Engine()

    def next_version(version):
        latest = chain.read_latest(store)
        assert latest is not None and latest.manifest is not None
        manifest = chain.read_manifest(store, latest.manifest, trainer.run)
        assert all(
            digest.digest(bits) == manifest.tensors[name].digest_value
            for name, bits in engine.tensors.items()
        )
        if version < 4:
            publish(trainer, version + 1)
        else:
            finish(store)

    engine.on_update = next_version
    run(SyncAgent(store, tmp_path / "mirror", engine, "a", settings=QUICK))
    assert engine.versions == [1, 2, 3, 4]
    assert_serves(engine, store, TREES[4], tmp_path)
    last = ack(store)
    assert (last["agent"], last["version"], last["incarnation"]) == ("a", 4, 1)
    assert (last["updates"], last["errors"], last["fallbacks"]) == (4, 0, 0)
    assert last["pause_ms"] == 4 * [1.5]
    assert last["verified_tensors"] == 4 * len(engine.tensors)
    assert abs(last["time"] - time.time()) < 600


def test_an_engine_that_failed_half_way_gets_every_tensor_again(tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = publisher(store)
    publish(trainer, 1)
    engine = Engine(failures={2, 3})
    engine.on_update = lambda version: publish(trainer, 2) if version == 1 else finish(store)
    agent = SyncAgent(store, tmp_path / "mirror", engine, "a", settings=QUICK)
    changed = []
    original = engine.update

    async def recording(update):
        changed.append(update.changed)
        return await original(update)

    engine.update = recording
    run(agent)
    assert engine.versions == [1, 2] and engine.calls == 4
    assert len(changed[1]) < len(changed[0]) == len(changed[2]) == len(changed[3])
    assert_serves(engine, store, TREES[2], tmp_path)
    assert ack(store)["errors"] == 2


def test_an_engine_that_failed_after_it_took_the_new_version_gets_every_tensor_again(tmp_path):
    """It then reports the version that the mirror holds: what it reports after a failure is not believed."""
    store = tiny.open_store(tmp_path.name)
    trainer = publisher(store)
    publish(trainer, 1)
    engine = Engine(failures={2})
    original = engine.update

    async def hasty(update):
        engine.served = update.version
        if engine.calls + 1 in engine.failures:
            finish(store)
        return await original(update)

    engine.update = hasty
    engine.on_update = lambda version: publish(trainer, 2) if version == 1 else None
    run(SyncAgent(store, tmp_path / "mirror", engine, "a", settings=QUICK))
    assert engine.versions == [1, 2] and engine.calls == 3
    assert_serves(engine, store, TREES[2], tmp_path)
    assert (ack(store)["version"], ack(store)["errors"]) == (2, 1)


def test_an_engine_that_never_recovers_ends_the_agent_with_the_reason(tmp_path):
    store = tiny.open_store(tmp_path.name)
    publish(publisher(store), 1)
    engine = Engine(failures=range(1000))
    settings = AgentSettings(poll=0.01, heartbeat=1.0, patience=0.2, retry=0.01)
    with pytest.raises(AgentError, match=r"agent a: no success .*out of memory.*start the agent again"):
        run(SyncAgent(store, tmp_path / "mirror", engine, "a", settings=settings))


def test_an_engine_restarted_behind_the_agents_back_is_brought_up_to_date(tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = publisher(store)
    publish(trainer, 1)
    engine = Engine()

    def restart_once(version):
        if len(engine.versions) == 1:
            engine.served, engine.tensors = None, {}
        else:
            finish(store)

    engine.on_update = restart_once
    run(SyncAgent(store, tmp_path / "mirror", engine, "a", settings=QUICK))
    assert engine.versions == [1, 1]
    assert_serves(engine, store, TREES[1], tmp_path)


def test_an_agent_waits_for_a_run_and_for_a_store_out_of_reach(tmp_path):
    store = tiny.Unreachable.open(f"memory://{tmp_path.name}")
    engine = Engine()
    agent = SyncAgent(store, tmp_path / "mirror", engine, "a", settings=QUICK)

    async def scenario():
        task = asyncio.create_task(agent.run())
        while agent.errors < 1:
            await asyncio.sleep(0.01)
        tiny.open_store(tmp_path.name)
        trainer = publisher(Store.open(store.url))
        await asyncio.to_thread(publish, trainer, 1)
        store.failing = True
        seen = agent.errors
        while agent.errors < seen + 2:
            await asyncio.sleep(0.01)
        finish(Store.open(store.url))
        store.failing = False
        await asyncio.wait_for(task, 300)

    asyncio.run(scenario())
    assert engine.versions == [1]
    assert ack(store)["errors"] >= 3


def test_a_pin_holds_the_version_until_its_result_or_its_expiry(tmp_path):
    store = tiny.open_store(tmp_path.name)
    trainer = publisher(store)
    for number in (1, 2, 3, 4):
        publish(trainer, number)
    request = {"prompts": [0, 4], "purpose": "eval"}
    far = 3600.0
    store.put_json(
        "control/evaluations/second.json", request | {"id": "second", "version": 2, "expires_after": far}
    )
    third = {"id": "third", "version": 3, "expires_after": far}
    store.put_json("control/evaluations/third.json", request | third)
    store.put_json(
        "control/evaluations/old.json", request | {"id": "old", "version": 1, "expires_after": 0.0}
    )
    store.put_json("control/evaluations/broken.json", {"version": "x"})
    store.put("control/evaluations/torn.json", b"{")
    engine = Engine()
    agent = SyncAgent(store, tmp_path / "mirror", engine, "a", settings=QUICK)

    async def scenario():
        task = asyncio.create_task(agent.run())

        async def holds(version):
            while engine.served != version:
                await asyncio.sleep(0.01)
            while (ack(store) or {}).get("version") != version:  # it follows the update
                await asyncio.sleep(0.01)
            before = ack(store)["time"]
            while ack(store)["time"] < before + 0.1:  # heartbeats pass, and it stays
                await asyncio.sleep(0.01)
            assert engine.served == version

        await holds(2)
        store.put_json("evaluations/second/result.json", {"version": 2})
        await holds(3)
        store.put_json("evaluations/third/result.json", {"version": 3})
        await holds(4)
        finish(store)
        await asyncio.wait_for(task, 300)

    asyncio.run(scenario())
    assert engine.versions == [2, 3, 4]


def test_a_pin_holds_the_host_that_answers_it_and_lets_the_others_go_on(tmp_path):
    """Unclaimed it holds both; claimed for one, that one; again both once the claim stands still."""
    store = tiny.open_store(tmp_path.name)
    trainer = publisher(store)
    for number in (1, 2, 3):
        publish(trainer, number)
    request = EvaluationRequest(id="e", version=2, prompts=(0, 4), expires_after=3600.0)
    store.put_json(request.key, request.to_json())
    claim = EvaluationClaim(id="e", worker="w", agent="one", lease_seconds=60.0)
    engines = {name: Engine() for name in ("one", "other")}
    agents = [
        SyncAgent(store, tmp_path / name, engine, name, settings=QUICK) for name, engine in engines.items()
    ]

    async def scenario():
        tasks = [asyncio.create_task(agent.run()) for agent in agents]

        async def until(condition):
            while not condition():
                await asyncio.sleep(0.01)

        await until(lambda: all(engine.served == 2 for engine in engines.values()))
        store.put_json(claim.key, claim.to_json())
        await until(lambda: engines["other"].served == 3)
        assert engines["one"].served == 2
        store.put_json(request.result_key, {})
        await until(lambda: engines["one"].served == 3)
        finish(store)
        await asyncio.wait_for(asyncio.gather(*tasks), 300)

    asyncio.run(scenario())
    assert [engine.versions for engine in engines.values()] == [[2, 3], [2, 3]]
    now = [0.0]
    store.delete(request.result_key)
    unchanged = Unchanged(lambda: now[0])
    assert [len(pins_of(store, name, unchanged=unchanged)) for name in engines] == [1, 0]
    now[0] = 60.0
    assert [len(pins_of(store, name, unchanged=unchanged)) for name in engines] == [1, 1]


def test_agents_of_two_hosts_have_different_names_and_a_restart_has_the_same(tmp_path):
    """As two hosts with the same configuration, run directory and host name would make them."""
    first, second = (agent_name(tmp_path / host, "server-0") for host in ("a", "b"))
    assert first != second and first.startswith("server-0-") and second.startswith("server-0-")
    assert agent_name(tmp_path / "a", "server-0") == first
    store = tiny.open_store(tmp_path.name)
    for name in (first, second):
        SyncAgent(store, tmp_path / name, Engine(), name)  # a name that an agent may have


def test_a_version_pinned_while_the_agent_looks_is_not_passed(tmp_path):
    """The trainer publishes, pins and publishes again between the agent's look at pins and its next."""
    trainer = publisher(tiny.open_store(tmp_path.name))
    publish(trainer, 1)
    engine = Engine()
    request = {"id": "e", "version": 2, "prompts": [0, 4], "purpose": "eval", "expires_after": 3600.0}

    class Slow(Store):
        def list(self, prefix: str) -> list[str]:
            found = super().list(prefix)
            if prefix == EVALUATIONS_PREFIX and engine.versions == [1] and trainer.head.version == 1:
                publish(trainer, 2)
                self.put_json(f"{EVALUATIONS_PREFIX}e.json", request)
                publish(trainer, 3)
            return found

    store = Slow.open(f"memory://{tmp_path.name}")

    def goes_on(version):
        if version == 2:
            store.put_json("evaluations/e/result.json", {"version": 2})
        if version == 3:
            finish(store)

    engine.on_update = goes_on
    run(SyncAgent(store, tmp_path / "mirror", engine, "a", settings=QUICK))
    assert engine.versions == [1, 2, 3]


def test_a_first_version_that_comes_while_the_agent_looks_is_served_and_not_quarantined(tmp_path):
    """The head, read before, had none."""
    trainer = publisher(tiny.open_store(tmp_path.name))
    engine = Engine()

    class Slow(Store):
        def list(self, prefix: str) -> list[str]:
            if prefix == EVALUATIONS_PREFIX and trainer.head.version == 0:
                publish(trainer, 1)
            return super().list(prefix)

    store = Slow.open(f"memory://{tmp_path.name}")
    engine.on_update = lambda _version: finish(store)
    run(SyncAgent(store, tmp_path / "mirror", engine, "a", settings=QUICK))
    assert engine.versions == [1]
    assert not store.list(QUARANTINE_PREFIX) and ack(store)["errors"] == 0


def test_an_engine_that_serves_the_same_version_of_another_run_is_given_this_runs(tmp_path):
    """As a server that outlived its agent: with the mirror of the run before, at this one's version."""
    engine = Engine()
    for number in (1, 2):
        store = tiny.open_store(f"{tmp_path.name}-{number}")
        publish(publisher(store), number)
        finish(store)
        run(SyncAgent(store, tmp_path / "mirror", engine, "a", settings=QUICK))
    assert engine.versions == [1, 1]
    assert_serves(engine, store, TREES[2], tmp_path)


@pytest.mark.parametrize("moment", ["fetch", "journal", "apply", "update", "ack"])
def test_an_agent_killed_anywhere_is_started_again_and_serves_the_head(moment, tmp_path, monkeypatch):
    name = tmp_path.name
    trainer = publisher(tiny.open_store(name))
    publish(trainer, 1)

    class Dying(tiny.Mortal):
        armed = False

        def read(self, key):
            if self.armed and moment == "fetch" and key.endswith(".blob"):
                raise tiny.Killed
            return super().read(key)

        def put_json(self, key, value):
            if self.armed and moment == "ack":
                raise tiny.Killed
            super().put_json(key, value)

    store = Dying.open(f"memory://{name}")
    engine = Engine()

    def after_first(version):
        if version == 1:
            publish(trainer, 2)
            publish(trainer, 3)
            store.armed = True
            if moment in ("journal", "apply"):
                monkeypatch.setattr(
                    f"rollout_bridge.weights.read.journal.{'write' if moment == 'journal' else 'read'}",
                    lambda *args: (_ for _ in ()).throw(tiny.Killed()),
                )
        elif moment == "update":
            raise tiny.Killed

    engine.on_update = after_first
    store_of_checks = Store.open(store.url)
    if moment == "ack":
        store.armed = True  # dies before anything is acknowledged
    with pytest.raises(tiny.Killed):
        run(SyncAgent(store, tmp_path / "mirror", engine, "a", settings=QUICK))
    monkeypatch.undo()
    finish(store_of_checks)
    fresh = Engine()  # the engine died with the host
    run(SyncAgent(store_of_checks, tmp_path / "mirror", fresh, "a", settings=QUICK))
    assert fresh.served == 3
    assert_serves(fresh, store_of_checks, TREES[3], tmp_path)
    assert ack(store_of_checks)["version"] == 3


def test_a_cancelled_agent_holds_its_mirror_until_its_thread_has_ended(tmp_path):
    class Held(Store):
        reached, let = threading.Event(), threading.Event()

        def read(self, key):
            if key.endswith(".blob"):
                self.reached.set()
                assert self.let.wait(300)
            return super().read(key)

    publish(publisher(tiny.open_store(tmp_path.name)), 1)
    store = Held.open(f"memory://{tmp_path.name}")

    async def scenario():
        agent = SyncAgent(store, tmp_path / "mirror", Engine(), "a", settings=QUICK)
        task = asyncio.create_task(agent.run())
        assert await asyncio.to_thread(store.reached.wait, 300)
        for _ in range(2):  # as by a second signal
            task.cancel()
            await asyncio.sleep(0.05)
            with pytest.raises(MirrorError, match="another process owns it"):
                Mirror(tmp_path / "mirror")
        store.let.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        Mirror(tmp_path / "mirror").close()

    try:
        asyncio.run(scenario())
    finally:
        store.let.set()


def test_an_agent_of_a_finished_run_that_published_nothing_exits(tmp_path):
    store = tiny.open_store(tmp_path.name)
    finish(store)
    run(SyncAgent(store, tmp_path / "mirror", Engine(), "a", settings=QUICK))
    assert ack(store)["version"] is None


def test_names_and_owners_are_checked(tmp_path):
    store = tiny.open_store(tmp_path.name)
    with pytest.raises(ValueError, match=r"agent_id: 'a/b'"):
        SyncAgent(store, tmp_path, Engine(), "a/b")
    first = tiny.subscriber(store, tmp_path / "mirror")
    with pytest.raises(MirrorError, match="another process owns it"):
        run(SyncAgent(store, tmp_path / "mirror", Engine(), "a", settings=QUICK))
    first.mirror.close()


def test_acknowledgements_are_json_that_others_can_read(tmp_path):
    store = tiny.open_store(tmp_path.name)
    finish(store)
    run(SyncAgent(store, tmp_path / "mirror", Engine(), "host-1", settings=QUICK))
    data = store.read(f"{ACKS_PREFIX}host-1.json")
    assert data is not None and json.loads(data).keys() == {
        "agent", "version", "incarnation", "time", "updates", "pause_ms", "verified_tensors", "fallbacks",
        "setbacks", "broken_versions", "errors", "last_error",
    }  # fmt: skip


def goes_on(name, directory, failing, arrives):
    """(store, engine, agent) after versions 1 to 4, of which acknowledgement number `failing` failed."""
    tiny.open_store(name)
    store = FailsOnce.open(f"memory://{name}", probe=False)
    trainer = publisher(store)
    publish(trainer, 1)
    engine = Engine()
    engine.on_update = lambda version: publish(trainer, version + 1) if version < 4 else finish(store)
    store.arm(failing, arrives=arrives, prefix=ACKS_PREFIX)
    seldom = AgentSettings(poll=0.01, heartbeat=1e9, patience=300.0, retry=0.01)
    agent = SyncAgent(store, directory, engine, "a", settings=seldom)
    run(agent)
    return store, engine, agent


@pytest.mark.parametrize("arrives", [False, True], ids=["not-written", "written"])
def test_an_acknowledgement_that_failed_is_counted_and_the_agent_goes_on(arrives, tmp_path):
    """One after each of four versions and one at the end: a heartbeat that is never due adds none."""
    store, _, _ = goes_on(f"{tmp_path.name}-sound", tmp_path / "sound", None, arrives)
    assert len(store.keys) == 5
    for failing in range(5):
        directory = tmp_path / f"{failing}"
        store, engine, agent = goes_on(f"{tmp_path.name}-{failing}", directory, failing, arrives)
        assert engine.versions == [1, 2, 3, 4] and (agent.updates, agent.errors) == (4, 1)
        assert "injected" in agent.last_error
        assert len(store.keys) == (6 if failing == 4 else 5), "the last one is tried until the store takes it"
        last = ack(store)
        assert (last["version"], last["updates"], last["errors"]) == (4, 4, 1)
        assert_serves(engine, store, TREES[4], directory)


def test_a_version_file_that_failed_is_counted_and_the_agent_goes_on(tmp_path, monkeypatch):
    """Of version 3, whose bits are then in the mirror under version 2."""
    renames = Renames()
    monkeypatch.setattr(os, "replace", renames)
    goes_on(f"{tmp_path.name}-sound", tmp_path / "sound", None, False)
    at = [place for place, name in enumerate(renames.names) if name == "version.json"][2]
    monkeypatch.undo()
    monkeypatch.setattr(os, "replace", Renames(at))
    store, engine, agent = goes_on(tmp_path.name, tmp_path / "mirror", None, False)
    assert engine.versions == [1, 2, 3, 4] and agent.errors == ack(store)["errors"] == 1
    assert "No space left" in agent.last_error and not store.list(QUARANTINE_PREFIX)
    assert_serves(engine, store, TREES[4], tmp_path)
