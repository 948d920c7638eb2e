"""The two programs of training: `accumulate` sums over a microbatch, `apply` makes one step of the sums.

A batch is any number of microbatches, so batch-size warm-up changes no shape and compiles nothing again. Sums
are unnormalised float32: the step divides once by the whole batch's token weight, then clips, then updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.data.batch import Batch
from jaxtrain.models.balance import RouterStatistics
from jaxtrain.models.definition import Definition
from jaxtrain.models.router import correction_bias_update
from jaxtrain.optim import noise_scale
from jaxtrain.optim.qk_clip import QkClip

Arrays = dict[str, jax.Array]
Scalar = jax.Array | np.float32
# Buffers that balance the routers, in the order of the rows of expert counts.
CORRECTION_BIASES = ("moe/mlp/router/correction_bias", "mtp/layer/mlp/router/correction_bias")
MTP_METRIC = "mtp_loss"  # what a loss function calls the MTP layers' loss among its metrics


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossSums:
    """Sums over the tokens of a microbatch.

    `loss` is differentiated; `metrics` are sums with weight `weight`. mtp: loss of the multi-token prediction
    layers, a sum that `LossScales.mtp` multiplies; None without such layers.
    """

    loss: jax.Array
    weight: jax.Array
    metrics: Arrays
    router: RouterStatistics
    mtp: jax.Array | None = None


LossFunction = Callable[[Definition, Mapping[str, jax.Array], Batch], LossSums]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """What `accumulate` adds up over a batch; float32.

    tokens: valid tokens, loss or not: a denominator, inexact above 2**24. `Batch.valid_tokens` is exact.
    noise: None unless the gradient noise scale is measured, and then costs nothing. max_logits: the largest
    of each head of each layer, not a sum; None, and without cost, unless the model measures them.
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
class TrainState:
    """params: trained float32 masters by path; buffers: without gradient; optimizer: its state."""

    params: Arrays
    buffers: Arrays
    optimizer: optax.OptState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScales:
    """Factors of the auxiliary losses' sums, float32 scalars from the host's schedules.

    The step divides every gradient once, by the batch's token weight W. A loss with a denominator N of its
    own over the batch therefore has the factor weight * W / N.
    """

    balance: Scalar
    mtp: Scalar


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """Values of the schedules for this step, float32 scalars, so that they are no reason to compile."""

    learning_rate: Scalar
    router_bias_rate: Scalar


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """Float32 scalars of one step, and a vector. `finite` is False when the step was skipped.

    loss, balance_loss: means. gradient_norm: before clipping. update_rms: of the change of all trained
    parameters.
    load_violation: largest over layers of max expert load over mean load, minus 1; load_violations: of each
    layer with a router, those of MTP last.
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
    definition: Definition,
    loss_function: LossFunction,
    state: TrainState,
    sums: Sums,
    microbatch: Batch,
    scales: LossScales,
) -> Sums:
    """Adds one microbatch [row, sequence]."""

    def objective(params: Arrays) -> tuple[jax.Array, LossSums]:
        out = loss_function(definition, {**params, **state.buffers}, microbatch)
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
    params: Mapping[str, jax.Array],
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
    """One optimizer step of sums whose `metrics` and `noise` are left out. qk_clip: after the step, by the
    batch's logits.

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
    params = optax.apply_updates(state.params, steps)
    if qk_clip is not None:
        params = qk_clip.apply(params, sums.max_logits)
    changed = TrainState(
        params=params,
        buffers=_balance(state.buffers, sums.expert_counts, jnp.asarray(inputs.router_bias_rate)),
        optimizer=optimizer_state,
    )
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), changed, state)
    size = sum(value.size for value in state.params.values())
    load = sums.expert_counts / jnp.maximum(sums.expert_counts.mean(-1, keepdims=True), 1e-20)
    return kept, StepMetrics(
        loss=sums.loss / weight,
        balance_loss=sums.balance / jnp.maximum(sums.tokens, 1.0),
        gradient_norm=norm,
        update_rms=jnp.where(finite, optax.tree.norm(steps) / size**0.5, 0.0),
        weight=sums.weight,
        load_violation=jnp.max(load, initial=1.0) - 1.0,
        load_violations=jnp.max(load, axis=-1, initial=1.0) - 1.0,
        finite=finite,
        max_logit=None if sums.max_logits is None else sums.max_logits.max(),
    )


def _balance(buffers: Arrays, counts_LE: jax.Array, rate: jax.Array) -> Arrays:
    """The routers' correction biases move by the sign of the whole batch's load, after all sums are in."""
    moved, first = dict(buffers), 0
    for path in CORRECTION_BIASES:
        if path in buffers:
            rows = counts_LE[first : first + buffers[path].shape[0]]
            moved[path] = buffers[path] + correction_bias_update(rows, rate=rate)
            first += rows.shape[0]
    return moved
