"""The tiny models as functions of their parameters, and parameters that leave no part of them trivial."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.models.balance import RouterStatistics
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define, initialize
from tests.jaxtrain.models.tiny import HF_CONFIG

CONFIG = ModelConfig.from_hf(HF_CONFIG, compute_dtype="float32")


def perturbed_parameters(seed: int, config: ModelConfig = CONFIG) -> dict[str, jax.Array]:
    """Initial parameters plus noise of 0.3, of 0.1 for norms: as initialised, biases are 0 and norms 1."""
    rng = np.random.default_rng(seed)
    return {
        path: value + (0.1 if "norm" in path else 0.3) * rng.normal(size=value.shape).astype(np.float32)
        for path, value in sorted(initialize(config, seed=seed).items())
    }


def tokens_of(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, HF_CONFIG["vocab_size"], shape).astype(np.int32)


def forward(
    params: Mapping[str, jax.Array],
    tokens: np.ndarray,
    positions: np.ndarray | None = None,
    segment_ids: np.ndarray | None = None,
    *,
    config: ModelConfig = CONFIG,
    return_experts: bool = False,
) -> tuple[jax.Array, RouterStatistics]:
    """Logits [row, sequence, vocabulary] and router statistics; without the last two, a document a row.

    return_experts: the statistics hold the ids chosen.
    """
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
    segment_ids = np.ones(tokens.shape, np.int32) if segment_ids is None else segment_ids

    @jax.jit
    def run(params):
        model = define(config).bind(params)
        hidden, statistics = model(
            jnp.asarray(tokens),
            jnp.asarray(positions),
            jnp.asarray(segment_ids),
            return_experts=return_experts,
        )
        return model.logits(hidden), statistics

    return run(params)
