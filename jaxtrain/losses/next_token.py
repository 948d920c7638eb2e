"""Next-token prediction: the negative log-likelihood of the targets, summed with `loss_weights`."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from jaxtrain.data.batch import Batch, Column
from jaxtrain.losses.base import LossSums, final_hidden
from jaxtrain.losses.mtp import with_drafts
from jaxtrain.losses.target_logprobs import target_nll
from jaxtrain.models.definition import Definition, Params


@dataclass(frozen=True)
class NextToken:
    """Cross-entropy; metric `entropy` of the predictions, in nats."""

    @property
    def columns(self) -> tuple[Column, ...]:
        return ()

    def __call__(self, definition: Definition, params: Params, batch: Batch) -> LossSums:
        hidden, router = final_hidden(definition, params, batch)
        weights = jnp.asarray(batch.loss_weights)
        out = target_nll(definition, params, hidden, jnp.asarray(batch.targets), weights)
        sums = LossSums(loss=out.loss, weight=weights.sum(), metrics={"entropy": out.entropy}, router=router)
        return with_drafts(sums, definition, params, hidden, batch)
