"""Contract 5: the one batch all recipes train on, arrays [microbatch, row, sequence]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed documents. Token t of a row predicts `targets[t]` with weight `loss_weights[t]`.

    tokens, targets: int32. loss_weights: float32, 0 where nothing is learnt. segment_ids: int32, from 1 in
    each row, 0 is padding. positions: int32 within the document.
    Reinforcement learning adds, per target token, 0 (temperature: 1) where there is none:
    behavior_logprobs, advantages, temperature: float32. versions: int32, -1 where not sampled.
    routed_experts: int16, two axes more (MoE layer, k): experts that each input token is to keep where
    plausible, -1 = the trainer's router chooses; None replays nothing.
    """

    tokens: np.ndarray | jax.Array
    targets: np.ndarray | jax.Array
    loss_weights: np.ndarray | jax.Array
    segment_ids: np.ndarray | jax.Array
    positions: np.ndarray | jax.Array
    behavior_logprobs: np.ndarray | jax.Array
    advantages: np.ndarray | jax.Array
    temperature: np.ndarray | jax.Array
    versions: np.ndarray | jax.Array
    routed_experts: np.ndarray | jax.Array | None = None

    def valid_tokens(self) -> int:
        """Tokens of documents, loss or not, padding left out; an exact count at any size."""
        return int(np.count_nonzero(self.segment_ids))

    def microbatches(self) -> Iterator[Batch]:
        """Each microbatch alone, arrays [row, sequence]."""
        for index in range(self.tokens.shape[0]):
            given = {f.name: getattr(self, f.name) for f in fields(self)}
            yield Batch(**{name: None if value is None else value[index] for name, value in given.items()})
