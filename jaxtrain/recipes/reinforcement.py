"""The RL phase: plan, read, train, publish."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtrain.config.references import PLAN_COLUMNS, build
from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.data.sources.plans import PlannedBatches, Planning, TrainerClock
from jaxtrain.losses.base import replay_column
from jaxtrain.publishing.evaluations import Evaluations, announce
from jaxtrain.publishing.publication import RL, PublishPolicy
from jaxtrain.training.phase import Phase, stages
from jaxtrain.training.progress import Progress
from jaxtrain.training.run import Run
from jaxtrain.training.state import TrainState
from rollout_bridge.store import Store


def reinforcement(run: Run, store: Store, policy: PublishPolicy, evaluations: Evaluations) -> Phase:
    """Steps on the plans of the store; each is announced before, published and evaluated after."""
    config, clock, model = run.config, TrainerClock(), run.trainable.definition.config
    assert isinstance(config, AsyncGrpoConfig)
    replayed = (model.num_moe_layers, model.num_experts_per_tok)
    replays = config.rollouts.capture_routed_experts
    filters = config.trajectories.filters
    planning = Planning(
        store=store,
        config=config,
        advantage=build("advantage", config.rl.advantage, where="rl.advantage"),
        filters=tuple(
            build("filter", rule, where=f"trajectories.filters.{i}") for i, rule in enumerate(filters)
        ),
        replayed=replayed if replays else None,
        clock=clock,
        version=lambda: policy.version,
        lag=policy.lag,
    )

    def before(progress: Progress) -> None:
        announce(store, RL, progress, policy.version)
        clock.set(progress.of(RL).steps)

    def after(state: TrainState, progress: Progress, values: Mapping[str, float]) -> Mapping[str, float]:
        if run.all_done(lambda: policy.settle(run.check_stop)):
            policy.follow(state, progress, update_rms=values["update_rms"])
            evaluations.renew()
        return policy.metrics()

    loss = build("loss", config.rl.loss, where="rl.loss")
    return Phase(
        name=RL,
        section=config.rl,
        loss=loss,
        batches=lambda spec: PlannedBatches(planning, spec),
        columns=(*loss.columns, replay_column(*replayed)) if replays else loss.columns,
        filled=PLAN_COLUMNS,
        stages=stages((), config.batch, run.trainable.definition),
        before_step=before,
        after_step=after,
    )
