"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv 1910.07467), statistics in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*N D"], scale: Float[Array, " D"], *, eps: float) -> Float[Array, "*N D"]:
    """In the dtype of x."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * inverse).astype(x.dtype) * scale.astype(x.dtype)
