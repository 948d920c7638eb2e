"""gspo.py, turn_discount.py and too_easy.py: a loss, an advantage and a filter in files outside the packages.

Expected numbers are calculated by hand, or from the paper's equations as they are written.
"""

from __future__ import annotations

import uuid
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.base import Reference
from jaxtrain.config.load import load_config
from jaxtrain.config.references import build
from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.data.batch import Batch
from jaxtrain.data.sources.base import BatchShape, BatchSpec
from jaxtrain.data.sources.plans import PlannedBatches, Planning, TrainerClock
from jaxtrain.losses.policies.base import PolicyTokens
from jaxtrain.models.config import ModelConfig
from jaxtrain.training.build import mesh_of, trainable_of
from jaxtrain.training.phase import ScheduledValues
from jaxtrain.training.programs import train_step
from rollout_bridge.store import Store
from rollout_bridge.trajectories.log import SegmentWriter
from rollout_bridge.trajectories.plan import read_plan
from rollout_bridge.trajectories.schema import Status, Trajectory, Turn, TurnKind
from tests.extending.examples import EXAMPLES

TURNS = (
    Turn(TurnKind.PROMPT, 0, 2),
    Turn(TurnKind.MODEL, 2, 4),
    Turn(TurnKind.TOOL, 4, 5),
    Turn(TurnKind.MODEL, 5, 7),
)
OWN = np.array([0, 0, 1, 1, 0, 1, 1], bool)  # the policy's tokens of a trajectory with these turns


@pytest.fixture
def config() -> AsyncGrpoConfig:
    loaded = load_config(EXAMPLES / "gspo.yaml")
    assert isinstance(loaded, AsyncGrpoConfig)
    return loaded


@pytest.fixture
def tokens() -> PolicyTokens:
    """Four documents of 2, 1, 1 and 1 tokens, and one of padding; each document has weight 1."""
    return PolicyTokens(
        logprobs_N=jnp.log(jnp.array([0.12, 0.45, 0.15, 0.15, 0.05, 0.3])),
        behavior_logprobs_N=jnp.log(jnp.array([0.10, 0.50, 0.10, 0.10, 0.10, 0.1])),
        advantages_N=jnp.array([2.0, 2.0, -1.0, 1.0, -1.0, 9.0]),
        weights_N=jnp.array([0.5, 0.5, 1.0, 1.0, 1.0, 0.0]),
        documents_N=jnp.array([1, 1, 2, 3, 4, 0]),
        num_documents=5,
    )


def test_the_objective_by_hand(config, tokens):
    """eps 0.1 and 0.2. Ratios sqrt(1.2 * 0.9), 1.5, 1.5 and 0.5: in the window; outside it, where the clipped
    one is larger; clipped to 1.2; clipped to 0.9.
    """
    loss, metrics = build("loss", config.rl.loss, where="rl.loss").objective(tokens)
    assert loss == pytest.approx(-(2 * np.sqrt(1.08) - 1.5 + 1.2 - 0.9), rel=1e-6)
    assert metrics["sequence_ratio"] == pytest.approx(np.sqrt(1.08) + 1.5 + 1.5 + 0.5, rel=1e-6)
    assert metrics["clipped_fraction"] == pytest.approx(2)


def test_the_gradient_is_that_of_the_papers_equations(config, tokens):
    """Equations 5 to 7 as they stand, one ratio a document; the advantage is the same for its tokens."""
    loss = build("loss", config.rl.loss, where="rl.loss")

    def equation_5(logprobs_N):
        difference_N = logprobs_N - tokens.behavior_logprobs_N
        means = jnp.array([difference_N[:2].mean(), *difference_N[2:5]])
        s, advantages = jnp.exp(means), tokens.advantages_N[1:5]
        return -jnp.minimum(s * advantages, jnp.clip(s, 0.9, 1.2) * advantages).sum()

    expected = jax.grad(equation_5)(tokens.logprobs_N)
    found = jax.grad(lambda x_N: loss.objective(replace(tokens, logprobs_N=x_N))[0])(tokens.logprobs_N)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert (found != 0).tolist() == [True, True, True, False, False, False]


def test_the_discount_by_hand(config):
    """Of 8, half a turn and 0.9 a token of the policy; the tool's token counts for nothing."""
    named = Reference.model_validate({"name": config.rl.advantage.name, "per_turn": 0.5, "per_token": 0.9})
    advantage = build("advantage", named, where="rl.advantage")
    values = advantage.of_tokens(trajectory(0, 0, reward=1.0), 8.0)
    expected = [0, 0, 8 * 0.5 * 0.9**3, 8 * 0.5 * 0.9**2, 0, 8 * 0.9, 8]
    np.testing.assert_allclose(values, expected, rtol=1e-6)


def trajectory(group: int, member: int, *, reward: float) -> Trajectory:
    return Trajectory(
        trajectory_id=f"{group:08d}/{member}",
        group_id=f"{group:08d}",
        prompt_index=group,
        member=member,
        task="made/up",
        token_ids=np.arange(7, dtype=np.int32) + group,
        trainable=OWN,
        behavior_logprobs=np.where(OWN, -np.log(64), 0).astype(np.float32),
        versions=np.where(OWN, 0, -1).astype(np.int32),
        turns=TURNS,
        temperature=1.0,
        seed=member,
        max_tokens=8,
        finish_reason="stop",
        kv_policy="keep_kv",
        status=Status.OK,
        reward=reward,
        rewards={"right": reward},
        engine="made-up",
        worker="w",
        created_at=0.0,
        generate_seconds=0.25,
    )


def documents_in(batch: Batch) -> list[np.ndarray]:
    """Where each document of a batch is, bool like its tokens."""
    ids = np.asarray(batch.segment_ids)
    found = sorted({(int(m), int(r), int(ids[m, r, s])) for m, r, s in np.argwhere(ids)})
    microbatches, rows = np.indices(ids.shape)[:2]
    return [(microbatches == m) & (rows == r) & (ids == segment) for m, r, segment in found]


def test_a_planned_batch_and_a_step_on_it(config, one_device):
    """Groups with equal rewards, with a mean of 0.75, and of 0.5. The config's filters drop two, its
    advantage discounts the others, and its loss trains on them.
    """
    store = Store.open(f"memory://{uuid.uuid4().hex}", probe=False)
    for group, rewards in enumerate([(1, 1), (1, 0.5), *[(1, 0)] * 5]):
        members = [trajectory(group, i, reward=float(reward)) for i, reward in enumerate(rewards)]
        SegmentWriter(store, "w").append(members)
    clock = TrainerClock()
    clock.set(0)
    rules = enumerate(config.trajectories.filters)
    planning = Planning(
        store=store,
        config=config,
        advantage=build("advantage", config.rl.advantage, where="rl.advantage"),
        filters=tuple(build("filter", rule, where=f"trajectories.filters.{i}") for i, rule in rules),
        replayed=None,
        clock=clock,
        version=lambda: 0,
        lag=lambda version, step: 0,
    )
    loss = build("loss", config.rl.loss, where="rl.loss")
    shape = BatchShape(microbatches=1, rows=4, sequence_length=14)  # two trajectories of 7 tokens a row
    spec = BatchSpec(shape_at=lambda tokens: shape, columns=loss.columns, steps=1)
    packed = next(iter(PlannedBatches(planning, spec)))

    plan = read_plan(store, 0)
    assert plan is not None and len(plan.rows) == 8
    dropped = {reason: {row.group_id for row in rows} for reason, rows in plan.drops.items()}
    assert dropped == {"no_signal": {"00000000"}, "too_easy": {"00000001"}}

    batch = packed.batch
    documents = documents_in(batch)
    assert len(documents) == 8 and batch.tokens.shape == (1, 4, 14)  # so some share a row
    discount = np.array([0.9 * 0.98**3, 0.9 * 0.98**2, 0.98, 1])
    for where in documents:
        trained = where & (np.asarray(batch.loss_weights) > 0)
        np.testing.assert_allclose(np.asarray(batch.loss_weights)[trained], 1 / 4)
        advantages = np.asarray(batch["advantages"])[trained]
        np.testing.assert_allclose(advantages / advantages[-1], discount, rtol=1e-6)
        assert abs(advantages[-1]) == 0.5

    hf_config = config.model.hf_config(vocab_size=64, eos_token_id=0, pad_token_id=0)
    model = ModelConfig.from_hf(hf_config, **config.model.numerics)
    trainable = trainable_of(config.optimizer, model, mesh_of(config.mesh))
    programs = trainable.programs(loss, rows=shape.rows, sequence_length=shape.sequence_length)
    values = ScheduledValues(learning_rate=1e-3, router_bias_rate=0.0, balance_weight=0.0, mtp_weight=0.0)
    _, report = train_step(programs, trainable.placement, trainable.initial_state(seed=0), batch, values)
    assert report.finite and report.values["gradient_norm"] > 0
    assert report.values["weight"] == pytest.approx(8)  # a mean over trajectories
    # A new model knows nothing: each of its 64 tokens has a log-probability near -log 64, as when sampled.
    assert report.values["sequence_ratio"] == pytest.approx(1, abs=0.05)
    assert report.values["clipped_fraction"] == 0
