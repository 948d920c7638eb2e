"""What an engine must say of master weights: the decoder over whole sequences, quantised on the host.

No chain, no codec, no cache and no engine is in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from rollout_bridge import architectures
from rollout_bridge.quantization import host
from rollout_bridge.quantization.plan import Format
from rollout_bridge.weights.format.run import RunInfo

Weights = dict[str, np.ndarray]


class ServedOracle:
    """Log-probabilities at temperature 1, in float32, of sequences up to `length` tokens."""

    def __init__(self, run: RunInfo, *, length: int) -> None:
        self._run, self._length = run, length
        self.definition = define(ModelConfig.from_hf(run.hf_config, compute_dtype="float32"))

        @jax.jit
        def table(params: dict[str, jax.Array], ids: jax.Array) -> jax.Array:
            positions, segments = jnp.arange(length)[None], jnp.ones((1, length), jnp.int32)
            model = self.definition.bind(params)
            hidden, _ = model(ids, positions, segments)
            return jax.nn.log_softmax(model.logits(hidden).astype(jnp.float32))[0]

        self._table: Any = table

    def served(self, params: Mapping[str, Any]) -> Weights:
        """What is computed with, of float32 master weights: BF16, by FP8 blocks where the plan says."""
        tensors: Weights = {}
        arrays = {path: np.asarray(params[path]) for path in self.definition.shapes}
        for name, tensor in architectures.from_tree(self._run.hf_config, arrays):
            if self._run.plan.formats[name] is Format.f32:
                tensors[name] = tensor
                continue
            bits = host.float32_to_bfloat16_bits(tensor)
            if self._run.plan.formats[name] is Format.fp8_block:
                bits = host.dequantize_block_fp8(*host.quantize_block_fp8(bits), name=name)
            tensors[name] = bits.view(ml_dtypes.bfloat16).astype(np.float32)
        return architectures.to_tree(self._run.hf_config, tensors.__getitem__)

    def logprobs(self, weights: Weights, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """[T], of each token after those before it; that of the first is 0."""
        size = len(tokens)
        ids = np.zeros((1, self._length), np.int32)
        ids[0, :size] = tokens
        found = np.asarray(self._table(weights, ids))
        return np.concatenate([[0.0], found[np.arange(size - 1), ids[0, 1:size]]])
