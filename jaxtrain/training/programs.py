"""The compiled programs of a loss, and one optimizer step with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxtrain.config.errors import ConfigError
from jaxtrain.data.batch import Batch
from jaxtrain.losses.base import Loss
from jaxtrain.models.definition import Definition
from jaxtrain.optim.noise_scale import NoiseSums, estimate
from jaxtrain.optim.qk_clip import QkClip
from jaxtrain.training.compilations import compilations
from jaxtrain.training.phase import ScheduledValues
from jaxtrain.training.state import StatePlacement, TrainState
from jaxtrain.training.step import LossScales, StepInputs, StepMetrics, Sums, accumulate, apply, zero_sums
from sharding.tree import shard


@dataclass(frozen=True)
class Programs:
    """Compiled functions of one loss.

    `zero() -> sums`, `accumulate(state, sums, microbatch, scales) -> sums`, and
    `apply(state, sums without metrics and noise, inputs) -> state, metrics`, which all losses share. State
    and sums are donated where they are replaced.
    """

    zero: Callable[[], Sums]
    accumulate: Callable[[TrainState, Sums, Batch, LossScales], Sums]
    apply: Callable[[TrainState, Sums, StepInputs], tuple[TrainState, StepMetrics]]


@dataclass(frozen=True)
class StepReport:
    """One step as numbers on the host.

    values: those of `host_values`. seconds: wall time, device work included. compilations: programs compiled
    in it, operations outside jit included; 0 from the second step of its programs on.
    """

    values: dict[str, float]
    finite: bool
    seconds: float
    compilations: int


def sums_shardings(
    placement: StatePlacement,
    metric_names: tuple[str, ...],
    *,
    measure_noise: bool = False,
    measure_logits: bool = False,
) -> Sums:
    """Shardings of `Sums`: gradients as the parameters, the rest replicated."""
    everywhere: Any = placement.replicated  # a tree of shardings has the class of the tree of arrays
    return Sums(
        gradients=placement.state.params,
        loss=everywhere,
        weight=everywhere,
        balance=everywhere,
        tokens=everywhere,
        expert_counts=everywhere,
        metrics={name: everywhere for name in metric_names},
        noise=NoiseSums(square_norms=everywhere, square_weights=everywhere) if measure_noise else None,
        max_logits=everywhere if measure_logits else None,
    )


def compile_apply(
    optimizer: optax.GradientTransformation,
    placement: StatePlacement,
    *,
    clip_norm: float,
    qk_clip: QkClip | None = None,
) -> Callable[[TrainState, Sums, StepInputs], tuple[TrainState, StepMetrics]]:
    """The jitted step, the same for every loss; compiles once, at its first use.

    qk_clip: needs a model with `measure_max_logits`.
    """
    return jax.jit(
        partial(apply, optimizer, clip_norm, qk_clip=qk_clip),
        donate_argnums=0,
        in_shardings=(
            placement.state,
            sums_shardings(placement, (), measure_logits=qk_clip is not None),
            placement.replicated,
        ),
        out_shardings=(placement.state, placement.replicated),
    )


def compile_programs(
    definition: Definition,
    placement: StatePlacement,
    abstract: TrainState,
    *,
    loss: Loss,
    microbatch: Mapping[str, jax.ShapeDtypeStruct],
    step: Callable[[TrainState, Sums, StepInputs], tuple[TrainState, StepMetrics]],
    measure_noise: bool = False,
) -> Programs:
    """Jitted programs of one loss; each compiles once, whatever the batch size becomes.

    abstract: shapes of the state. microbatch: of a microbatch's columns. step: `compile_apply`'s.
    measure_noise: report `noise_signal` and `noise_trace` with each step, for one more pass over the
    gradients a microbatch.
    """
    placed = definition.on(placement.mesh) if isinstance(placement.mesh, Mesh) else definition
    shapes: dict[str, Any] = dict(microbatch)  # for a shape evaluation, in place of the columns
    found = jax.eval_shape(partial(loss, placed), abstract.model, Batch(shapes))
    if taken := found.metrics.keys() & {field.name for field in fields(StepMetrics)}:
        raise ConfigError(
            [f"loss {type(loss).__name__}: metrics {sorted(taken)} are the step's own; rename them"]
        )
    sums = sums_shardings(
        placement,
        tuple(found.metrics),
        measure_noise=measure_noise,
        measure_logits=definition.config.measure_max_logits,
    )
    zero = jax.jit(
        partial(zero_sums, definition, abstract.params, tuple(found.metrics), measure_noise=measure_noise),
        out_shardings=sums,
    )
    add = jax.jit(
        partial(accumulate, placed, loss),
        donate_argnums=1,
        in_shardings=(placement.state, sums, placement.rows, placement.replicated),
        out_shardings=sums,
    )
    return Programs(zero=zero, accumulate=add, apply=step)


def train_step(
    programs: Programs, placement: StatePlacement, state: TrainState, batch: Batch, values: ScheduledValues
) -> tuple[TrainState, StepReport]:
    """One optimizer step on a whole batch; the old state is donated.

    The scheduled values are those of the tokens seen before this step. Every process passes the same batch.
    """
    started, compiled = time.perf_counter(), compilations()
    tokens = batch.valid_tokens()
    scales = LossScales(
        balance=np.float32(values.balance_weight * float(np.sum(batch.loss_weights)) / max(tokens, 1)),
        mtp=np.float32(values.mtp_weight),
    )
    sums = programs.zero()
    for microbatch in batch.microbatches():
        sums = programs.accumulate(state, sums, shard(microbatch, placement.rows), scales)
    inputs = StepInputs(
        learning_rate=np.float32(values.learning_rate), router_bias_rate=np.float32(values.router_bias_rate)
    )
    state, metrics = programs.apply(state, replace(sums, metrics={}, noise=None), inputs)
    numbers, finite = host_values(metrics, sums, tokens=tokens)
    return state, StepReport(
        values=numbers,
        finite=finite,
        seconds=time.perf_counter() - started,
        compilations=compilations() - compiled,
    )


def host_values(metrics: StepMetrics, sums: Sums, *, tokens: int) -> tuple[dict[str, float], bool]:
    """Numbers on the host, and whether they are finite; the loss's own sums become means over the weight.

    tokens: valid tokens of the batch, counted on the host, where no count is rounded.
    """
    host, totals, noise = jax.device_get((metrics, sums.metrics, sums.noise))
    weight = max(float(host.weight), 1e-20)
    apart = ("finite", "load_violations")
    measured = {name: value for name, value in vars(host).items() if value is not None}
    values = {name: float(value) for name, value in measured.items() if name not in apart}
    values |= {f"load_violation/{layer}": float(x) for layer, x in enumerate(host.load_violations)}
    values |= {name: float(total) / weight for name, total in totals.items()} | {"tokens": tokens}
    if noise is not None:
        found = estimate(
            square_norms=float(noise.square_norms),
            square_weights=float(noise.square_weights),
            weight=weight,
            gradient_norm=float(host.gradient_norm),
        )
        values |= {} if found is None else {"noise_signal": found.signal, "noise_trace": found.trace}
    return values, bool(host.finite)
