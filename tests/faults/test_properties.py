"""Random bits, random chains, random deaths: a reader holds a published version whole and ends at the head.

No accelerator and no quantiser: what is published is what the test drew, so the oracle is a dictionary.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_bridge import architectures, files
from rollout_bridge.quantization.plan import plan_for
from rollout_bridge.store import Store
from rollout_bridge.weights.format import run as runs
from rollout_bridge.weights.format.manifest import BrokenVersion, Kind
from rollout_bridge.weights.format.run import RunInfo
from rollout_bridge.weights.write import commit
from rollout_bridge.weights.write.encoder import Patch
from rollout_bridge.weights.write.garbage import Retention, collect
from rollout_bridge.weights.write.writer import ChainWriter, WriterSettings
from tests.rollout_bridge.weights import tiny

CONFIG = tiny.CONFIG | {
    "vocab_size": 5, "hidden_size": 3, "intermediate_size": 130, "moe_intermediate_size": 2,
    "n_routed_experts": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2,
    "partial_rotary_factor": 1.0,
}  # fmt: skip
MASKS = {1: 0x7F, 2: 0x7F80, 4: 0x7F800000}
Bits = dict[str, np.ndarray]


def new_run() -> RunInfo:
    return RunInfo.new(CONFIG, plan_for(architectures.tensors(CONFIG), serving=None))


RUN = new_run()


def drawn(random: np.random.Generator, before: Bits | None, density: float) -> Bits:
    """Every tensor anew, or elements of some tensors: any bits that are a number, zeros of either sign."""
    result = {}
    for name, spec in RUN.tensors.items():
        top = 1 << (8 * spec.bits.itemsize)
        bits = random.integers(0, top, spec.shape, dtype=np.uint64).astype(spec.bits)
        mask = spec.bits.type(MASKS[spec.bits.itemsize])
        bits[(bits & mask) == mask] = 0
        if before is not None:
            moves = random.random(spec.shape) < density * (random.random() < 0.5)
            bits = np.where(moves, bits, before[name])
        result[name] = bits
    return result


def split(random: np.random.Generator, shape: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """The whole, or the two halves that two devices hold."""
    axis = int(random.integers(len(shape)))
    whole = tuple((0, size) for size in shape)
    if shape[axis] < 2 or random.random() < 0.5:
        return [whole]
    cut = int(random.integers(1, shape[axis]))
    bounds = [(0, cut), (cut, shape[axis])]
    return [tuple(part if i == axis else w for i, w in enumerate(whole)) for part in bounds]


class Trainer:
    """A `ChainWriter` with a baseline, as the publisher is one."""

    def __init__(self, store: Store, random: np.random.Generator, *, full_every: int) -> None:
        settings = WriterSettings(encoders=1, object_bytes=int(random.integers(50, 5000)))
        self.writer = ChainWriter(store, RUN, settings, full_every=full_every)
        self.random = random
        self.writer.join(commit.take_over(store, owner="test"))
        self.baseline: Bits | None = None
        replayed = self.writer.replayed
        if replayed is not None:
            self.baseline = {name: np.array(replayed.tensor(name)) for name in RUN.tensors}
            self.writer.rebase(self._full(self.baseline))

    def publish(self, bits: Bits, attempt: str) -> int:
        begin = self.writer.begin(attempt, can_delta=self.baseline is not None)
        full = self._full(bits) if begin.kind is Kind.FULL else None
        change = None
        if self.baseline is not None and (full is None or begin.follows):
            change = self._change(self.baseline, bits)
        part = self.writer.write(begin, full=full, change=change)

        def durable() -> None:
            self.baseline = bits

        patches = full if change is None else change
        manifest = self.writer.commit(
            part, begin, patches=patches or [], step=1, update_rms=None, durable=durable
        )
        return manifest.version

    def _full(self, bits: Bits) -> list[tuple[str, Patch]]:
        return [
            (name, Patch(name=name, shape=array.shape, rectangle=box, values=array[_slices(box)]))
            for name, array in bits.items()
            for box in split(self.random, array.shape)
        ]

    def _change(self, old: Bits, new: Bits) -> list[tuple[str, Patch]]:
        patches = []
        for name in new:
            for box in split(self.random, new[name].shape):
                before, after = (np.ascontiguousarray(tree[name][_slices(box)]) for tree in (old, new))
                places = np.flatnonzero(before != after)
                if places.size:
                    patch = Patch(
                        name=name,
                        shape=new[name].shape,
                        rectangle=box,
                        values=after.reshape(-1)[places],
                        indices=places,
                        old=before.reshape(-1)[places],
                        before=before,
                    )
                    patches.append((name, patch))
        return patches


def _slices(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


class World(tiny.Mortal):
    """A store whose client may die at a write, and whose listing may lag behind."""

    lag = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.listings: list[list[str]] = []

    def list(self, prefix: str = "") -> list[str]:
        self.listings.append(super().list())
        seen = self.listings[max(0, len(self.listings) - 1 - self.lag)]
        return [key for key in seen if key.startswith(prefix)]


@contextmanager
def dying_at(call: int):
    """The process dies at the `call`-th file it renames or syncs, from 0."""
    lives = itertools.count(call, -1)
    originals = files.write_whole, files.sync_directory

    def wrap(original):
        def dying(*args, **kwargs):
            if next(lives) == 0:
                raise tiny.Killed
            return original(*args, **kwargs)

        return dying

    files.write_whole, files.sync_directory = map(wrap, originals)
    try:
        yield
    finally:
        files.write_whole, files.sync_directory = originals


small = st.integers(0, 6)
events = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from([0, 1, 5, 50, 100])),
        st.tuples(st.just("kill trainer before"), small),
        st.tuples(st.just("kill trainer after"), small),
        st.tuples(st.just("read"), st.just(0)),
        st.tuples(st.just("kill reader"), small),
        st.tuples(st.just("flip"), small),
        st.tuples(st.just("lose"), small),
        st.tuples(st.just("remove old"), st.integers(0, 3)),
        st.tuples(st.just("lag"), st.integers(0, 5)),
    ),
    min_size=4,
    max_size=14,
)


def live(events, seed: int, full_every: int, directory) -> None:
    random = np.random.default_rng(seed)
    runs.create_or_join(Store.open(f"memory://{directory.name}"), RUN)
    store = World.open(f"memory://{directory.name}", probe=False)
    trainer = Trainer(store, random, full_every=full_every)
    reader = tiny.subscriber(store, directory / "mirror")
    published: dict[int, Bits] = {}
    bits = drawn(random, None, 1.0)
    attempts = itertools.count()

    def publish() -> None:
        # Noted before it happens: a trainer that dies may have moved the head, and says nothing.
        published[trainer.writer.head.version + 1] = bits
        trainer.publish(bits, str(next(attempts)))

    def read() -> None:
        try:
            reader.advance()
        except BrokenVersion as error:
            assert reader.broken, error

    def check() -> None:
        if reader.mirror.state is not None:
            for name, expected in published[reader.mirror.state.ref.version].items():
                np.testing.assert_array_equal(reader.mirror.tensor(name), expected, err_msg=name)

    for event, argument in events:
        match event:
            case "publish":
                bits = drawn(random, bits, argument / 100)
                publish()
            case "kill trainer before" | "kill trainer after":
                bits = drawn(random, bits, 0.05)
                store.kill_at(argument, after=event.endswith("after"))
                try:
                    publish()
                except tiny.Killed:
                    store.kill_at(0)
                    trainer = Trainer(store, random, full_every=full_every)
                store.kill_at(0)
            case "read":
                read()
            case "kill reader":
                try:
                    with dying_at(argument):
                        read()
                except tiny.Killed:
                    reader.mirror._lock.close()
                    reader = tiny.subscriber(store, directory / "mirror")
            case "flip" | "lose":
                keys = [key for key in Store.list(store, "weights/versions/") if "begin" not in key]
                if keys:
                    key = keys[int(random.integers(len(keys)))]
                    data = store.read(key)
                    if event == "lose" or not data:
                        store.delete(key)
                    else:
                        place = int(random.integers(len(data)))
                        store.put(key, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            case "remove old":
                try:
                    collect(store, retention=Retention(versions=argument, seconds=0.0))
                except BrokenVersion:
                    assert "flip" in dict(events) or "lose" in dict(events)
            case "lag":
                store.lag = argument
        check()
    store.lag = 0
    reader.broken.clear()
    for _ in range(3):
        bits = drawn(random, bits, 0.1)
        publish()
        read()
        check()
    assert reader.mirror.version == trainer.writer.head.version
    reader.mirror.close()


ordinary = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
chains = given(events=events, seed=st.integers(0, 1 << 20), full_every=st.integers(1, 5))


@settings(ordinary, max_examples=10)
@chains
def test_whatever_happens_a_reader_holds_a_published_version(events, seed, full_every, tmp_path_factory):
    live(events, seed, full_every, tmp_path_factory.mktemp("property"))


@pytest.mark.faults
@pytest.mark.timeout(3600)
@settings(ordinary, max_examples=200)
@chains
def test_whatever_happens_two_hundred_times(events, seed, full_every, tmp_path_factory):
    live(events, seed, full_every, tmp_path_factory.mktemp("property"))
