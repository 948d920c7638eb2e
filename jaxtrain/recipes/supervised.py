"""The supervised phase: next-token prediction on worked answers.

It serves `sft` and the warm start of RL recipes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from jaxtrain.config.optimization import SupervisedPhase
from jaxtrain.data.worked_answers import WorkedAnswers
from jaxtrain.losses.objectives import NEXT_TOKEN_METRICS, next_token
from jaxtrain.training.context import Context, Progress, batch_ramp, learning_rate
from jaxtrain.training.step import TrainState
from jaxtrain.training.trainer import compile_programs, train_step
from rollout_bridge.rollouts.environments import registry as environments


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
    rows, length = config.batch.rows, config.batch.sequence_length
    environment = context.environment
    if phase.task_options is not None:
        arguments = config.environment.arguments(seed=config.seed, options=phase.task_options)
        environment = environments.create(config.environment.name, arguments)
    data = WorkedAnswers(
        environment, context.tokenizer, seed=config.seed, held_out=context.environment.held_out
    )
    rate = learning_rate(phase.learning_rate)
    ramp = batch_ramp(phase.batch, microbatch_tokens=rows * length)
    programs = compile_programs(
        context.definition,
        context.optimizer,
        context.placement,
        loss_function=next_token,
        metric_names=NEXT_TOKEN_METRICS,
        step=context.step,
    )
    while progress.supervised_steps < phase.steps:
        started = time.perf_counter()
        if before_step is not None:
            before_step(progress)
        microbatches = ramp.microbatches(progress.supervised_tokens)
        taken = data.batch(progress.position, microbatches=microbatches, rows=rows, sequence_length=length)
        lr = rate(progress.supervised_tokens)
        state, report = train_step(
            programs,
            context.placement,
            state,
            taken.batch,
            learning_rate=lr,
            router_bias_rate=phase.router_bias_rate,
            balance_weight=phase.aux_loss_weight,
        )
        tokens = int(np.count_nonzero(taken.batch.segment_ids))
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
                "learning_rate": lr,
                "tokens": tokens,
                "tokens_seen": progress.tokens_seen,
                "microbatches": microbatches,
                "step_seconds": report.seconds,
                "wait_seconds": time.perf_counter() - started - report.seconds,
            },
            phase=name,
        )
        context.save(state, progress)
        context.stop_if_asked(state, progress)
    return state, progress
