"""The protocol of a loss: a frozen dataclass of options that maps a microbatch to unnormalised sums.

A new loss is a new file. It declares the columns it reads, and its metrics are the keys of what it returns:
no other code of the trainer names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxtrain.data.batch import Batch, Column
from jaxtrain.models.balance import RouterStatistics
from jaxtrain.models.definition import Definition, Params

Arrays = dict[str, jax.Array]

REPLAYED = "routed_experts"  # column of the experts that each input token keeps where they are plausible


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossSums:
    """Sums over the tokens of a microbatch; float32 scalars.

    loss: differentiated; its denominator is the batch's `weight`. metrics: sums with the same denominator.
    mtp: loss of the multi-token prediction layers, which `LossScales.mtp` multiplies; None without them.
    """

    loss: jax.Array
    weight: jax.Array
    metrics: Arrays
    router: RouterStatistics
    mtp: jax.Array | None = None


class Loss(Protocol):
    """Called under jit, once a microbatch."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that it reads besides the standard ones."""
        ...

    def __call__(self, definition: Definition, params: Params, batch: Batch) -> LossSums:
        """params: by path, trained, frozen and buffers; those of other models under a prefix.

        batch: arrays [row, sequence, ...].
        """
        ...


def final_hidden(definition: Definition, params: Params, batch: Batch) -> tuple[jax.Array, RouterStatistics]:
    """Final hidden states [B, S, D] of a microbatch, and the routers' statistics."""
    replay = batch.get(REPLAYED)
    return definition.bind(params)(
        jnp.asarray(batch.tokens),
        jnp.asarray(batch.positions),
        jnp.asarray(batch.segment_ids),
        replay_BSLk=None if replay is None else jnp.asarray(replay, jnp.int32),
    )


def replay_column(moe_layers: int, experts_per_token: int) -> Column:
    """Experts of each input token, -1 where the trainer's router chooses; int16 [MoE layers, k]."""
    return Column(REPLAYED, "int16", -1, of="input", shape=(moe_layers, experts_per_token))
