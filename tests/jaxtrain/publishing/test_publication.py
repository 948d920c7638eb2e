"""When versions go out, which version a later step will have, and what the trainer's rows say of it."""

from __future__ import annotations

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
from jaxtrain.publishing.publication import Published, PublishPolicy
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


@pytest.mark.parametrize(
    ("every", "head", "expected"),
    [
        # Version 1 is of the weights before RL.
        (1, (1, 0), {0: 1, 1: 2, 2: 3, 7: 8}),
        (3, (1, 0), {0: 1, 1: 1, 2: 1, 3: 2, 5: 2, 6: 3, 8: 3, 9: 4}),
        # A redo from an earlier checkpoint: the head's version until its step, 10, is passed.
        (1, (5, 10), {7: 5, 8: 5, 10: 5, 11: 6, 12: 7}),
        (3, (4, 9), {7: 4, 9: 4, 11: 4, 12: 5, 15: 6}),
        # The last weights of an earlier start went out at RL step 10, between two multiples of 3.
        (3, (5, 10), {8: 5, 10: 5, 11: 5, 12: 6, 14: 6, 15: 7}),
    ],
)
def test_the_version_that_a_later_step_will_have(every, head, expected) -> None:
    policy = policy_at(*head, every=every)
    assert {step: policy.version_at(step) for step in expected} == expected


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_version_foretold_is_the_version_published(every) -> None:
    """Of every later step, at every step of an RL phase of nine; the warm start's weights are version 1."""
    policy = policy_at(0, 0, every=every)
    foretold: dict[int, set[int]] = {step: set() for step in range(10)}
    for step in range(10):
        policy.follow(STATE, progress_at(step))
        assert foretold[step] <= {policy.version}
        for later in range(step, 10):
            foretold[later].add(policy.version_at(later))
    recorder: Any = policy.publisher
    multiples = range(0, 10, every)
    assert recorder.published == [(n, WARM + step) for n, step in enumerate(multiples, start=1)]


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
