"""The supervised phase: next-token prediction on worked answers.

It serves `sft` and the warm start of RL recipes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from jaxtrain.config.optimization import SupervisedPhase
from jaxtrain.data.worked_answers import WorkedAnswers
from jaxtrain.losses.objectives import NEXT_TOKEN_METRICS, next_token
from jaxtrain.training.context import Context, Progress
from jaxtrain.training.phase_trainer import PhaseTrainer, open_trainer
from jaxtrain.training.phases import Stage, batch_ramp, scheduled_values, stage_at, stages
from jaxtrain.training.step import TrainState
from rollout_bridge.rollouts.environments.registry import EnvironmentSpec


def train(
    context: Context,
    state: TrainState,
    progress: Progress,
    phase: SupervisedPhase,
    *,
    name: str,
    before_step: Callable[[Progress], None] | None = None,
) -> tuple[TrainState, Progress]:
    """Steps until `phase.steps` are done; resumes from `progress`.

    name: labels the metrics. before_step: is told where the run is.
    """
    if progress.supervised_steps >= phase.steps:
        return state, progress
    config = context.config
    environment = context.environment
    if phase.environment:
        options = config.environment.options | phase.environment
        spec = EnvironmentSpec(name=config.environment.name, options=options, seed=config.seed)
        environment = spec.create(where=f"{name}.environment")
    data = WorkedAnswers(
        environment, context.tokenizer, seed=config.seed, held_out=context.environment.held_out
    )
    values_at = scheduled_values(phase)
    schedule = stages(phase, config.batch, context.definition)
    stage = stage_at(schedule, progress.supervised_tokens)
    trainer = _trainer(context, phase, stage)
    while progress.supervised_steps < phase.steps:
        started = time.perf_counter()
        if before_step is not None:
            before_step(progress)
        if stage_at(schedule, progress.supervised_tokens) is not stage:
            stage = stage_at(schedule, progress.supervised_tokens)
            trainer = _trainer(context, phase, stage)
        ramp = batch_ramp(phase.batch, microbatch_tokens=stage.microbatch_tokens)
        microbatches = ramp.microbatches(progress.supervised_tokens)
        taken = data.batch(
            progress.position,
            microbatches=microbatches,
            rows=stage.rows,
            sequence_length=stage.sequence_length,
        )
        values = values_at(progress.supervised_tokens)
        state, report = trainer.step(state, taken.batch, values)
        tokens = int(report.values["tokens"])
        progress = replace(
            progress,
            step=progress.step + 1,
            supervised_steps=progress.supervised_steps + 1,
            supervised_tokens=progress.supervised_tokens + tokens,
            position=taken.position,
        )
        progress = context.count_nonfinite(progress, finite=report.finite)
        context.metrics.write(
            progress.step,
            {
                **report.values,
                "tokens_seen": progress.tokens_seen,
                "microbatches": microbatches,
                "sequence_length": stage.sequence_length,
                "step_seconds": report.seconds,
                "wait_seconds": time.perf_counter() - started - report.seconds,
            },
            phase=name,
        )
        context.save(state, progress)
        context.agree_to_stop()
        context.stop_if_asked(state, progress)
    return state, progress


def _trainer(context: Context, phase: SupervisedPhase, stage: Stage) -> PhaseTrainer:
    return open_trainer(
        context, phase, stage.definition, loss_function=next_token, metric_names=NEXT_TOKEN_METRICS
    )
