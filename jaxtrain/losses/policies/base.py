"""Shared by policy objectives: the forward pass, their columns, and the loss of MTP layers.

An objective is a function of `PolicyTokens`; the rest of a policy loss is `policy_sums`.
"""

# N tokens of a microbatch, rows one after another

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtrain.data.batch import Batch, Column
from jaxtrain.losses.base import Arrays, LossSums, final_hidden
from jaxtrain.losses.mtp import with_drafts
from jaxtrain.losses.target_logprobs import target_logprobs
from jaxtrain.models.definition import Definition, Params

POLICY_COLUMNS = (
    Column("behavior_logprobs", "float32", 0.0, of="target"),
    Column("advantages", "float32", 0.0, of="target"),
    Column("temperature", "float32", 1.0, of="document"),
)


@dataclass(frozen=True)
class PolicyTokens:
    """What an objective reads of each target token.

    logprobs_N: of the trained policy at the sampling temperature, with gradient. behavior_logprobs_N: of the
    policy that sampled. advantages_N. weights_N: 0 where a token is not trained on. documents_N: int32, which
    document of the microbatch a token belongs to, in [0, `num_documents`); padding has ids of its own.
    """

    logprobs_N: jax.Array
    behavior_logprobs_N: jax.Array
    advantages_N: jax.Array
    weights_N: jax.Array
    documents_N: jax.Array
    num_documents: int

    def document_mean(self, values_N: jax.Array) -> jax.Array:
        """Each token's document mean of `values_N` over the trained tokens, [N]; 0 without any."""
        total, count = (
            jax.ops.segment_sum(x_N * self.weights_N, self.documents_N, self.num_documents)
            for x_N in (values_N, jnp.ones_like(values_N))
        )
        return (total / jnp.maximum(count, 1e-20))[self.documents_N]


Objective = Callable[[PolicyTokens], tuple[jax.Array, Arrays]]


def policy_sums(definition: Definition, params: Params, batch: Batch, objective: Objective) -> LossSums:
    """Sums of a policy objective, which returns its loss and its metrics as sums over tokens.

    The denominator is the weight of all trainable tokens, masked ones included, so that masking does not
    raise the weight of the other tokens. MTP layers learn to predict the policy's tokens: no gradient of
    their loss reaches the policy. They count in the global norm, so clipping also shrinks the policy's step.
    """
    hidden, router = final_hidden(definition, params, batch)
    out = target_logprobs(
        definition,
        params,
        hidden,
        jnp.asarray(batch.targets),
        temperature=jnp.asarray(batch["temperature"]),
        counted=jnp.asarray(batch.loss_weights) != 0,
    )
    rows, length = batch.targets.shape
    weights_N = jnp.asarray(batch.loss_weights).reshape(-1)
    documents_BS = jnp.asarray(batch.segment_ids) + jnp.arange(rows)[:, None] * (length + 1)
    loss, metrics = objective(
        PolicyTokens(
            logprobs_N=out.logprobs,
            behavior_logprobs_N=jnp.asarray(batch["behavior_logprobs"]).reshape(-1),
            advantages_N=jnp.asarray(batch["advantages"]).reshape(-1),
            weights_N=weights_N,
            documents_N=documents_BS.reshape(-1),
            num_documents=rows * (length + 1),
        )
    )
    sums = LossSums(
        loss=loss,
        weight=weights_N.sum(),
        metrics={"entropy": (out.entropy * weights_N).sum(), **metrics},
        router=router,
    )
    fixed = {
        path: value if path.startswith("mtp/") else jax.lax.stop_gradient(value)
        for path, value in params.items()
    }
    return with_drafts(sums, definition, fixed, jax.lax.stop_gradient(hidden), batch)
