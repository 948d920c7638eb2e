"""Rotary position embedding on the first `rotary_dim` channels of a head.

Source: Su et al. 2021, arXiv 2104.09864.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rollout_bridge.architectures.rope import RopeScaling


def rotation(
    positions_BS: Int[Array, "B S"], *, rotary_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Float[Array, "B S r/2"], Float[Array, "B S r/2"]]:
    """cos and sin, float32, for r = rotary_dim channels."""
    if scaling is not None:
        frequencies = jnp.asarray(scaling.frequencies(rotary_dim, theta), jnp.float32)
        angles = positions_BS[..., None].astype(jnp.float32) * frequencies
        return jnp.cos(angles) * scaling.attention_factor, jnp.sin(angles) * scaling.attention_factor
    exponents = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    angles = positions_BS[..., None].astype(jnp.float32) / (theta**exponents)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x_BSHh: Float[Array, "B S H h"], cos: Float[Array, "B S r/2"], sin: Float[Array, "B S r/2"]
) -> Float[Array, "B S H h"]:
    """Rotates channel i against channel i + rotary_dim/2; the remaining channels pass unchanged."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None, :].astype(x_BSHh.dtype), sin[:, :, None, :].astype(x_BSHh.dtype)
    first, second, rest = x_BSHh[..., :half], x_BSHh[..., half : 2 * half], x_BSHh[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
