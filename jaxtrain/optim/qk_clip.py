"""QK-clip: scales query and key weights down where a head's attention logits exceed a threshold.

L layers, D model, H query heads, K key heads, G = H/K query heads that share a key head, h head width
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def head_factors(
    max_logits_LH: Float[Array, "L H"], threshold: float, *, key_heads: int
) -> tuple[Float[Array, "L H"], Float[Array, "L K"]]:
    """Returns factors for the weights of query heads and of key heads; 1 leaves a head unchanged.

    max_logits_LH: the largest scaled logit q.k / sqrt(h) that each head had in the batch, or any value below
    the threshold where it had none.

    The logits of a head above the threshold t shrink by t / max, those of all other heads not at all. With
    one query head a key head each takes the root of that (Kimi K2, arXiv 2507.20534, algorithm 1). A shared
    key head takes the root of the mildest factor in its group, 1 unless all its heads are above, and each
    query head the rest.
    """
    layers, heads = max_logits_LH.shape
    factor_LKG = jnp.minimum(1.0, threshold / jnp.maximum(max_logits_LH, 1e-20))
    factor_LKG = factor_LKG.reshape(layers, key_heads, heads // key_heads)
    key_LK = jnp.sqrt(factor_LKG.max(-1))
    return (factor_LKG / key_LK[..., None]).reshape(layers, heads), key_LK


@dataclasses.dataclass(frozen=True, kw_only=True)
class QkClip:
    """The clip of one model.

    Attributes:
      threshold: largest logit; 100 in Kimi K2.
      key_heads: K of the model.
      stacks: path prefix and number of layers of each stack, in the order of the rows of the logits.
    """

    threshold: float
    key_heads: int
    stacks: tuple[tuple[str, int], ...] = ()

    def apply(
        self, params: Mapping[str, jax.Array], max_logits_LH: Float[Array, "L H"]
    ) -> dict[str, jax.Array]:
        """Returns `params` with the q and k projections (kernel [L, D, heads * h] and bias) of heads scaled.

        Only weights are scaled, not momentum, as in the paper.
        """
        query_LH, key_LK = head_factors(max_logits_LH, self.threshold, key_heads=self.key_heads)
        scaled, first = dict(params), 0
        for prefix, layers in self.stacks:
            rows = slice(first, first + layers)
            for name, factors in (("q_proj", query_LH[rows]), ("k_proj", key_LK[rows])):
                for leaf in ("kernel", "bias"):
                    path = f"{prefix}/attention/{name}/{leaf}"
                    if path in params:
                        scaled[path] = _scaled(params[path], factors)
            first += layers
        return scaled


def _scaled(x: Float[Array, "L ..."], factors: Float[Array, "L heads"]) -> Float[Array, "L ..."]:
    layers, heads = factors.shape
    width = x.shape[-1] // heads
    per_column = jnp.repeat(factors, width, axis=-1).reshape(layers, *(1,) * (x.ndim - 2), -1)
    return (x * per_column).astype(x.dtype)
