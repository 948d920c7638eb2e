"""The two programs of training: `accumulate` sums over a microbatch, `apply` makes one step of the sums.

A batch is any number of microbatches, so batch-size warm-up changes no shape and compiles nothing again. Sums
are unnormalised float32: the step divides once by the whole batch's token weight, then clips, then updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.data.batch import Batch
from jaxtrain.losses.base import Loss, LossSums
from jaxtrain.models.balance import balanced_buffers, load_violations
from jaxtrain.models.definition import Definition
from jaxtrain.optim import noise_scale
from jaxtrain.optim.qk_clip import QkClip
from jaxtrain.training.state import Arrays, TrainState

Scalar = jax.Array | np.float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Sums of `accumulate` over a batch; float32.

    tokens: valid tokens, loss or not: a denominator, inexact above 2**24. `Batch.valid_tokens` is exact.
    noise: None unless the gradient noise scale is measured. max_logits: the largest of each head of each
    layer, not a sum; None unless the model measures them. None costs nothing.
    """

    gradients: Arrays
    loss: jax.Array
    weight: jax.Array
    balance: jax.Array
    tokens: jax.Array
    expert_counts: jax.Array
    metrics: Arrays
    noise: noise_scale.NoiseSums | None = None
    max_logits: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScales:
    """Factors of the auxiliary losses' sums, float32 scalars from the host's schedules.

    The step divides every gradient once, by the batch's token weight W. A loss with another
    denominator N over the batch therefore has the factor weight * W / N.
    """

    balance: Scalar
    mtp: Scalar


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """Values of the schedules for this step, float32 scalars; arguments, so they compile nothing."""

    learning_rate: Scalar
    router_bias_rate: Scalar


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """Float32 scalars of one step, and a vector. `finite` is False when the step was skipped.

    loss, balance_loss: means. gradient_norm: before clipping. update_rms: of the change of all trained
    parameters. load_violation: largest over layers of max expert load over mean load, minus 1;
    load_violations: of each layer with a router, those of MTP last.
    max_logit: largest attention logit of all heads, before QK-clip; None unless measured.
    """

    loss: jax.Array
    balance_loss: jax.Array
    gradient_norm: jax.Array
    update_rms: jax.Array
    weight: jax.Array
    load_violation: jax.Array
    load_violations: jax.Array
    finite: jax.Array
    max_logit: jax.Array | None = None


def accumulate(
    definition: Definition, loss: Loss, state: TrainState, sums: Sums, microbatch: Batch, scales: LossScales
) -> Sums:
    """Adds one microbatch [row, sequence]."""

    def objective(params: Arrays) -> tuple[jax.Array, LossSums]:
        out = loss(definition, {**params, **state.frozen, **state.buffers}, microbatch)
        total = out.loss + scales.balance * out.router.balance.sum()
        return total if out.mtp is None else total + scales.mtp * out.mtp, out

    (_, out), gradients = jax.value_and_grad(objective, has_aux=True)(state.params)
    return Sums(
        gradients=jax.tree.map(jnp.add, sums.gradients, gradients),
        loss=sums.loss + out.loss,
        weight=sums.weight + out.weight,
        balance=sums.balance + out.router.balance.sum(),
        tokens=sums.tokens + (microbatch.segment_ids > 0).sum(),
        expert_counts=sums.expert_counts + out.router.counts,
        metrics=jax.tree.map(jnp.add, sums.metrics, out.metrics),
        noise=None if sums.noise is None else noise_scale.add(sums.noise, gradients, out.weight),
        max_logits=(None if sums.max_logits is None else jnp.maximum(sums.max_logits, out.router.max_logits)),
    )


def zero_sums(
    definition: Definition,
    params: Mapping[str, jax.ShapeDtypeStruct],
    metric_names: tuple[str, ...],
    *,
    measure_noise: bool = False,
) -> Sums:
    """Sums of no microbatch; traceable. measure_noise: with the sums of the gradient noise scale."""
    config = definition.config
    experts = config.n_routed_experts if config.num_routers else 0
    scalar = jnp.zeros((), jnp.float32)
    return Sums(
        gradients={path: jnp.zeros_like(value, jnp.float32) for path, value in params.items()},
        loss=scalar,
        weight=scalar,
        balance=scalar,
        tokens=scalar,
        expert_counts=jnp.zeros((config.num_routers, experts), jnp.float32),
        metrics={name: scalar for name in metric_names},
        noise=noise_scale.empty() if measure_noise else None,
        max_logits=(
            jnp.full((config.num_hidden_layers, config.num_attention_heads), jnp.finfo(jnp.float32).min)
            if config.measure_max_logits
            else None
        ),
    )


def apply(
    optimizer: optax.GradientTransformation,
    clip_norm: float,
    state: TrainState,
    sums: Sums,
    inputs: StepInputs,
    *,
    qk_clip: QkClip | None = None,
) -> tuple[TrainState, StepMetrics]:
    """One optimizer step of sums without `metrics` and `noise`. qk_clip: after it, by the batch's logits.

    A batch with a non-finite loss or gradient, or without any weight, changes nothing.
    """
    weight = jnp.maximum(sums.weight, 1e-20)
    norm = optax.tree.norm(sums.gradients) / weight
    finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss) & (sums.weight > 0)
    # Division and clipping are one factor: gradients are read by the optimizer, never written again.
    scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-20)) / weight
    gradients = jax.tree.map(lambda g: jnp.where(finite, g * scale, 0.0), sums.gradients)
    directions, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
    steps = jax.tree.map(lambda d: inputs.learning_rate * d, directions)
    params: Any = optax.apply_updates(state.params, steps)  # optax types it as any tree
    if qk_clip is not None:
        assert sums.max_logits is not None  # the model measures them for the clip
        params = qk_clip.apply(params, sums.max_logits)
    changed = TrainState(
        params=params,
        frozen=state.frozen,
        buffers=balanced_buffers(
            state.buffers, sums.expert_counts, rate=jnp.asarray(inputs.router_bias_rate)
        ),
        optimizer=optimizer_state,
    )
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), changed, state)
    size = sum(value.size for value in state.params.values())
    violations = load_violations(sums.expert_counts)
    return kept, StepMetrics(
        loss=sums.loss / weight,
        balance_loss=sums.balance / jnp.maximum(sums.tokens, 1.0),
        gradient_norm=norm,
        update_rms=jnp.where(finite, optax.tree.norm(steps) / size**0.5, 0.0),
        weight=sums.weight,
        load_violation=jnp.max(violations, initial=0.0),
        load_violations=violations,
        finite=finite,
        max_logit=None if sums.max_logits is None else sums.max_logits.max(),
    )
