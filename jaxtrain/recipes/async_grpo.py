"""Asynchronous GRPO: a warm start, then policy-gradient steps on whatever the rollout fleet has sent.

Trainer and fleet meet only in the store. Every step trains on a plan written before it (contract 4), and
every version follows the last one in the chain (contract 1), so a restart redoes what the plans say: it
restores a checkpoint, trains the recorded plans again, publishes nothing until the head's step is passed,
and goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.data.packing import Document, pack
from jaxtrain.losses.objectives import POLICY_METRICS, policy
from jaxtrain.models.config import ModelConfig
from jaxtrain.recipes import supervised
from jaxtrain.rl.control import Evaluations, announce
from jaxtrain.rl.publication import Publications
from jaxtrain.training.context import TOKENIZER_PROMPTS, Context, Progress, open_context
from jaxtrain.training.phase_trainer import open_trainer
from jaxtrain.training.phases import batch_ramp, scheduled_values
from jaxtrain.training.step import TrainState
from rollout_bridge.control import FINISHED, WARM_START
from rollout_bridge.rollouts.transcript import prompt_ids
from rollout_bridge.store import Store
from rollout_bridge.trajectories.dataset import PlanDataset, PlannedStep
from rollout_bridge.trajectories.gate import Gate
from rollout_bridge.trajectories.plan import PlanError, discard_plans_after
from rollout_bridge.trajectories.planner import Planner
from rollout_bridge.trajectories.selection import SelectionSettings
from sharding import processes

log = logging.getLogger(__name__)

FILL = 0.95  # of a batch's positions that a plan aims at; best-fit packing loses less than the rest


def run(config: AsyncGrpoConfig, run_dir: Path, *, discard_plans_after_step: int | None = None) -> None:
    """Trains until `rl.steps` are done and both evaluations are answered; run again to resume.

    discard_plans_after_step: forget the plans of later RL steps, the way out of a plan that cannot be
    trained.
    """
    store = Store.open(config.store_url)
    context = open_context(config, run_dir)
    try:
        check_prompts_fit(context, config)
        publications = Publications.open(context, store)
        try:
            train(context, store, publications, discard_plans_after_step=discard_plans_after_step)
        finally:
            publications.close()
    finally:
        context.close()


def train(
    context: Context, store: Store, publications: Publications, *, discard_plans_after_step: int | None
) -> None:
    """Warm start, RL steps, both evaluations."""
    config = context.config
    assert isinstance(config, AsyncGrpoConfig)
    state, progress = context.restore_or_initialize()
    if discard_plans_after_step is not None:
        discard_plans(store, progress, discard_plans_after_step)
    if progress.rl_steps and progress.supervised_steps < config.warm_start.steps:
        raise ConfigError(
            [
                f"warm_start.steps: {config.warm_start.steps} is more than the "
                f"{progress.supervised_steps} done before RL began; set it back, or start another run"
            ]
        )
    state, progress = supervised.train(
        context,
        state,
        progress,
        config.warm_start,
        name="warm_start",
        before_step=lambda progress: announce(store, WARM_START, progress, publications.version),
    )
    context.save(state, progress, force=True)

    evaluations = Evaluations(store, prompts=config.evaluation.prompts, timeout=config.evaluation.timeout_s)
    publications.follow(state, progress)
    if progress.rl_steps == 0 and publications.published_step == progress.step:
        evaluations.request(publications.version, step=0)
    state, progress = reinforce(context, store, publications, evaluations, state, progress)
    context.save(state, progress, force=True)  # the last version is what an export is of

    evaluations.request(publications.finish(state, progress), step=progress.rl_steps)
    evaluations.wait(stop=lambda: context.stop_if_asked(state, progress))
    announce(store, FINISHED, progress, publications.version)


def check_prompts_fit(context: Context, config: AsyncGrpoConfig) -> None:
    """Raises `ConfigError` if a prompt leaves no room for an answer in a row; looks at the first ones."""
    room = config.batch.sequence_length - config.rollouts.max_tokens
    count = min(context.environment.size, TOKENIZER_PROMPTS)
    longest = max(len(prompt_ids(context.tokenizer, context.environment.task(i))) for i in range(count))
    if longest > room:
        raise ConfigError(
            [
                f"batch.sequence_length: {config.batch.sequence_length} less rollouts.max_tokens "
                f"{config.rollouts.max_tokens} leaves {room} tokens for a prompt, one has {longest}; raise it"
            ]
        )


def discard_plans(store: Store, progress: Progress, step: int) -> None:
    """Forgets the plans of RL steps after `step`.

    Raises `PlanError` if the checkpoint has already trained one of them.
    """
    if step < progress.rl_steps - 1:
        raise PlanError(
            f"--discard-plans-after {step}: the newest checkpoint has trained RL steps up to "
            f"{progress.rl_steps - 1}; move newer checkpoints away, or give {progress.rl_steps - 1} or more"
        )
    if processes.process_index() == 0:
        log.warning("discarded the plans of steps %s", discard_plans_after(store, step))


def reinforce(
    context: Context,
    store: Store,
    publications: Publications,
    evaluations: Evaluations,
    state: TrainState,
    progress: Progress,
) -> tuple[TrainState, Progress]:
    """The RL steps: plan, read, train, publish."""
    config = context.config
    assert isinstance(config, AsyncGrpoConfig)
    phase, rows, length = config.rl, config.batch.rows, config.batch.sequence_length
    values_at = scheduled_values(phase)
    ramp = batch_ramp(phase.batch, microbatch_tokens=rows * length)
    trainer = open_trainer(
        context,
        phase,
        context.definition,
        loss_function=policy(eps_low=phase.eps_low, eps_high=phase.eps_high),
        metric_names=POLICY_METRICS,
    )
    replayed = replayed_experts(context.definition.config, config)
    planner = open_planner(config, store, replayed, lambda: context.stop_if_asked(state, progress))
    plans = iter(
        PlanDataset(
            store,
            first_step=progress.rl_steps,
            timeout_seconds=config.trajectories.wait_timeout_s,
            poll_seconds=POLL_SECONDS,
        )
    )
    while progress.rl_steps < phase.steps:
        started = time.perf_counter()
        announce(store, "rl", progress, publications.version)
        microbatches = ramp.microbatches(progress.rl_tokens)
        if planner is not None:
            planner.plan(
                progress.rl_steps,
                publications.version,
                timeout=config.trajectories.wait_timeout_s,
                target_tokens=int(FILL * microbatches * rows * length),
            )
        planned = next(plans)
        batch = pack(
            documents(planned, replay=replayed is not None),
            rows=rows,
            sequence_length=length,
            routed_experts=replayed,
        )
        waited = time.perf_counter() - started
        state, report = trainer.step(state, batch, values_at(progress.rl_tokens))
        tokens = int(report.values["tokens"])
        progress = replace(
            progress,
            step=progress.step + 1,
            rl_steps=progress.rl_steps + 1,
            rl_tokens=progress.rl_tokens + tokens,
        )
        progress = context.count_nonfinite(progress, finite=report.finite)
        publications.follow(state, progress, update_rms=report.values["update_rms"])
        context.metrics.write(
            progress.step,
            {
                **report.values,
                **trajectory_metrics(planned),
                **publications.metrics(),
                "tokens_seen": progress.tokens_seen,
                "microbatches": int(batch.tokens.shape[0]),
                "step_seconds": report.seconds,
                "wait_seconds": waited,
            },
            phase="rl",
        )
        context.save(state, progress)
        evaluations.renew()
        context.agree_to_stop()
        context.stop_if_asked(state, progress)
    return state, progress


POLL_SECONDS = 0.1


def replayed_experts(model: ModelConfig, config: AsyncGrpoConfig) -> tuple[int, int] | None:
    """(MoE layers, k) of the experts that engines send and the loss replays; None if they do not."""
    if not config.rollouts.capture_routed_experts:
        return None
    return model.num_moe_layers, model.num_experts_per_tok


def open_planner(
    config: AsyncGrpoConfig, store: Store, replayed: tuple[int, int] | None, check: Callable[[], None]
) -> Planner | None:
    """The planner, in process 0 only. `check` is called between looks at the log and may raise."""
    if processes.process_index() != 0:
        return None

    def sleep(seconds: float) -> None:
        check()
        time.sleep(seconds)

    section = config.trajectories
    planner = Planner(
        store,
        SelectionSettings(
            target_tokens=config.rl.batch.first_tokens,
            gate=Gate(max_lag=section.max_lag, min_fresh_fraction=section.min_fresh_fraction),
            min_valid_fraction=section.min_valid_fraction,
            length_bin_edges=length_bin_edges(config.batch.sequence_length, section.length_bins),
            drop_no_signal=section.drop_no_signal,
            routed_experts=replayed,
        ),
        outstanding_groups=config.rollouts.outstanding_groups,
        poll_seconds=POLL_SECONDS,
        sleep=sleep,
    )
    planner.open_credits()
    return planner


def length_bin_edges(longest: int, bins: int) -> tuple[int, ...]:
    """Upper edges in tokens of `bins` equal parts of [0, longest).

    The published number of bins is unknown.
    """
    return tuple(longest * part // bins for part in range(1, bins))


def documents(planned: PlannedStep, *, replay: bool) -> list[Document]:
    """What each planned row contributes: its trainable, fresh tokens, with one advantage for all of them.

    replay: with the experts that the engine sent.
    """
    return [
        Document(
            tokens=row.trajectory.token_ids,
            loss_weights=row.mask.astype(np.float32),
            behavior_logprobs=row.trajectory.behavior_logprobs,
            versions=row.trajectory.versions,
            routed_experts=row.trajectory.routed_experts if replay else None,
            advantage=row.advantage,
            temperature=row.trajectory.temperature,
        )
        for row in planned.rows
    ]


def trajectory_metrics(planned: PlannedStep) -> dict[str, float]:
    """Reward, and lag in versions of the tokens trained on."""
    lags = np.concatenate([planned.version - row.trajectory.versions[row.mask] for row in planned.rows])
    trainable = sum(int(row.trajectory.trainable.sum()) for row in planned.rows)
    return {
        "reward_mean": float(np.mean([row.trajectory.reward for row in planned.rows])),
        "lag_mean": float(lags.mean()) if lags.size else 0.0,
        "lag_max": int(lags.max()) if lags.size else 0,
        "masked_fraction": 1.0 - lags.size / max(trainable, 1),
        "trajectories": len(planned.rows),
        "mean_length": float(np.mean([len(row.trajectory.token_ids) for row in planned.rows])),
        "plan_version": planned.version,
    }
