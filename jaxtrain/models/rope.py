"""Rotary position embedding on the first `rotary_dim` channels of a head.

Source: Su et al. 2021, arXiv 2104.09864.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotation(positions_BS: jax.Array, *, rotary_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [B, S, rotary_dim / 2]."""
    exponents = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    angles = positions_BS[..., None].astype(jnp.float32) / (theta**exponents)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BSHh: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates channel i against channel i + rotary_dim/2; the remaining channels pass unchanged."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None, :].astype(x_BSHh.dtype), sin[:, :, None, :].astype(x_BSHh.dtype)
    first, second, rest = x_BSHh[..., :half], x_BSHh[..., half : 2 * half], x_BSHh[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
