"""When versions go out, how far behind a version is, and what the trainer's rows say of it."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxtrain.config.fleet import WeightSection
from jaxtrain.data.packing import Document, pack
from jaxtrain.losses.next_token import NextToken
from jaxtrain.models.config import ModelConfig
from jaxtrain.optim.optimizer import Method, OptimizerConfig
from jaxtrain.publishing.publication import Published, PublishPolicy, known_steps
from jaxtrain.training.build import trainable
from jaxtrain.training.phase import ScheduledValues
from jaxtrain.training.programs import train_step
from jaxtrain.training.progress import PhaseProgress, Progress
from jaxtrain.training.state import TrainState
from rollout_bridge import architectures
from rollout_bridge.architectures.tensors import paths
from rollout_bridge.quantization.plan import plan_for
from rollout_bridge.store import Store
from rollout_bridge.weights.format.manifest import Kind, Latest, ManifestRef
from rollout_bridge.weights.format.run import RunInfo, create_or_join
from rollout_bridge.weights.write.latest_wins import LatestWins, Ticket
from sharding.mesh import MeshSpec
from tests.jaxtrain.models.tiny import HF_CONFIG
from tests.rollout_bridge.weights import tiny

WARM = 4  # optimizer steps before RL


class Recorder:
    """Takes the place of the publisher where only the order of its calls counts."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.published: list[tuple[int, int]] = []  # (version, optimizer step)
        self.compared = 0

    def publish(self, params: Any, *, step: int, update_rms: float | None) -> Any:
        self.version += 1
        self.published.append((self.version, step))
        return SimpleNamespace(version=self.version)

    def verify_head(self, params: Any) -> bool:
        self.compared += 1
        return True


def policy_at(version: int, rl_step: int, *, every: int, publisher: Any = None) -> PublishPolicy:
    """Just started on a chain whose head is `version` of RL step `rl_step`; version 0: an empty chain."""
    step = WARM + rl_step
    head = Latest(version=0, step=0, incarnation=2)
    if version:
        reference = ManifestRef(version=version, incarnation=1, hash="0" * 64)
        head = Latest(version=version, step=step, incarnation=2, manifest=reference, full=reference)
    return PublishPolicy(
        publisher or Recorder(version),
        WeightSection(publish_every=every),
        head,
        Published(version, step if version else -1),
        rl_begins=WARM,
    )


def progress_at(rl_step: int) -> Progress:
    return Progress(step=WARM + rl_step, phases={"rl": PhaseProgress(steps=rl_step)})


STATE = TrainState({}, {}, {}, ())


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_version_every_so_many_steps(every) -> None:
    """Of an RL phase of nine steps; the warm start's weights are version 1."""
    policy = policy_at(0, 0, every=every)
    for step in range(10):
        policy.follow(STATE, progress_at(step))
    recorder: Any = policy.publisher
    multiples = range(0, 10, every)
    assert recorder.published == [(n, WARM + step) for n, step in enumerate(multiples, start=1)]


class SlowUploads:
    """Takes the place of the publisher where only its slot counts: each upload ends when it is let go."""

    def __init__(self) -> None:
        self.committed = dict[int, int]()  # version -> optimizer step of the weights
        self._tickets: list[Ticket[int]] = []
        self._let_go = threading.Semaphore(0)
        self._slot = LatestWins[tuple[int, int], int](
            self._upload, after=lambda version: None, replaced=lambda *jobs: TimeoutError(), name="upload"
        )

    def publish(self, params: Any, *, step: int, update_rms: float | None) -> Any:
        made: list[tuple[int, int]] = []

        def make(ahead: tuple[int, int] | None, waiting: tuple[int, int] | None) -> tuple[int, int]:
            made.append((1 + (ahead[0] if ahead else len(self.committed)), step))
            return made[0]

        self._tickets.append(self._slot.put(make))
        return SimpleNamespace(version=made[0][0])

    def _upload(self, job: tuple[int, int]) -> int:
        assert self._let_go.acquire(timeout=60)
        self.committed[job[0]] = job[1]
        return job[0]

    def let_one_go(self) -> None:
        [flight] = [ticket for ticket in self._tickets if not ticket.done()][:1]
        self._let_go.release()
        flight.result(300)


def test_lag_counts_optimizer_steps_however_slow_the_uploads() -> None:
    """Of 30 steps, with an upload that takes 10: two are in the store, one step and 19 behind the last."""
    uploads = SlowUploads()
    policy = policy_at(0, 0, every=1, publisher=uploads)
    for step in range(31):
        if step and step % 10 == 0:
            uploads.let_one_go()
        policy.follow(STATE, progress_at(step))
        for version, published in uploads.committed.items():
            assert policy.lag(version, step) == WARM + step - published
    assert uploads.committed == {1: WARM, 2: WARM + 9, 3: WARM + 19}
    assert [policy.lag(version, 30) for version in (1, 2, 3)] == [30, 21, 11]
    assert policy.lag(policy.version, 31) == 1 and policy.lag(policy.version + 7, 30) == -7
    for _ in range(2):
        uploads.let_one_go()
    assert (
        uploads.committed[policy.version] == WARM + 30
    )  # the last that waited has the number of those before


def test_lag_of_versions_of_an_earlier_start(tmp_path) -> None:
    """Their steps are those of their manifests: 3, 4, 8 and 9 of versions 1 to 4."""
    store = tiny.open_store(tmp_path.name)
    trainer = tiny.publisher(store)
    trainer.take_over()
    tree = tiny.params()
    for number, step in enumerate((3, 4, 8, 9)):
        tree = tiny.step(tree, number)
        trainer.publish(tiny.on_device(tree), step=step).result(300)
    head, run = trainer.head, trainer.run
    trainer.close()
    assert known_steps(store, head, run, back=100) == {4: 9, 3: 8, 2: 4, 1: 3}
    assert known_steps(store, head, run, back=2) == {4: 9, 3: 8, 2: 4}
    policy = policy_at(4, 9 - WARM, every=1)
    policy.steps.update({4: 9, 3: 8, 2: 4})
    lags = [policy.lag(version, 10 - WARM) for version in (4, 3, 2, 1, 0)]
    assert lags == [1, 2, 6, 7, 8], "of those not read, at least a step more each"


def test_a_redo_publishes_nothing_until_the_heads_step_is_passed_and_compares_there() -> None:
    """The checkpoint is of RL step 7, the head of 9."""
    policy = policy_at(4, 9, every=2)
    recorder: Any = policy.publisher
    for step in (7, 8, 9):
        policy.follow(STATE, progress_at(step))
        assert (policy.version, recorder.published) == (4, [])
    assert recorder.compared == 1
    for step in (10, 11):
        policy.follow(STATE, progress_at(step))
    assert recorder.published == [(5, WARM + 10)] and recorder.compared == 1


def test_what_was_overtaken_is_counted_before_the_first_version_is_out() -> None:
    """The first publication of a start compiles and takes long; a trainer may be stopped before it ends."""
    head = Latest(version=0, step=0, incarnation=2, owner="me")
    publisher: Any = SimpleNamespace(last=None, head=head, counters=Counter(overtaken=3))
    found = PublishPolicy(publisher, WeightSection(), head, Published(2, 5)).metrics()
    assert (found["version"], found["incarnation"], found["versions_overtaken"]) == (2, 2, 3)
    assert "delta_bytes" not in found and "publish_milliseconds" not in found  # of a version that is out


def test_a_delta_has_no_blob_of_a_tensor_that_is_frozen(tmp_path) -> None:
    """After a real step that trains the output head alone; a reader then holds the whole model."""
    model = ModelConfig.from_hf(HF_CONFIG, compute_dtype="float32")
    store = Store.open(f"memory://{tmp_path.name}")
    run = create_or_join(
        store, RunInfo.new(HF_CONFIG, plan_for(architectures.tensors(model), serving=None), tokenizer={})
    )
    publisher = tiny.publisher(store)
    publisher.take_over()
    built = trainable(
        model,
        MeshSpec(ici={"fsdp": 1}).build(jax.devices()[:1]),
        OptimizerConfig(overrides={"lm_head/kernel": Method.muon, "*": Method.frozen}),
        clip_norm=1.0,
    )
    state = built.initial_state(seed=0)
    assert publisher.publish(state.model, step=0).result(300).kind is Kind.FULL
    document = Document(tokens=np.arange(9, dtype=np.int32), loss_weights=np.ones(9, np.float32))
    batch = pack([document], rows=1, sequence_length=8)
    still = ScheduledValues(learning_rate=0.1, router_bias_rate=0.0, balance_weight=0.0, mtp_weight=0.0)
    programs = built.programs(NextToken(), rows=1, sequence_length=8)
    state, _ = train_step(programs, built.placement, state, batch, still)
    manifest = publisher.publish(state.model, step=1).result(300)
    assert manifest.kind is Kind.DELTA
    path_of = {source.name: path for path, group in paths(run.sources).items() for source in group}
    changed = {name for name, entry in manifest.tensors.items() if entry.blobs}
    assert {path_of.get(name.removesuffix("_scale_inv"), name) for name in changed} == {"lm_head/kernel"}
    reader = tiny.subscriber(store, tmp_path / "mirror")
    reader.advance()
    tiny.assert_holds(reader, {path: np.asarray(state.model[path]) for path in set(path_of.values())})
    publisher.close()
