"""Digests of arrays, computed where the arrays are: the same number on every mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32


def digests(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Returns a 32-bit digest of each array: the sum modulo 2^32 of a mix of index and bits of every element.

    The sum does not depend on how an array is sharded, and one changed element always changes it. It finds
    damage, not forgery. Every process calls it, with all the leaves.
    """
    by_devices: dict[Any, dict[str, Any]] = {}
    for path, leaf in leaves.items():
        devices = leaf.sharding.device_set if isinstance(leaf, jax.Array) else ()
        by_devices.setdefault(frozenset(devices), {})[path] = leaf
    found: dict[str, int] = {}
    for group in by_devices.values():
        values = jax.device_get(_digests(list(group.values())))
        found.update(zip(group, (int(value) for value in values), strict=True))
    return {path: found[path] for path in leaves}


@jax.jit
def _digests(arrays: list[Array]) -> list[UInt32[Array, ""]]:
    return [_digest(array) for array in arrays]


def _digest(array: Array) -> UInt32[Array, ""]:
    array = jnp.asarray(array)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    width = min(array.dtype.itemsize, 4)
    bits = jax.lax.bitcast_convert_type(array, np.dtype(f"uint{8 * width}")).astype(jnp.uint32)
    # The index of an element, modulo 2^32, without a reshape that would move shards.
    index = jnp.zeros((), jnp.uint32)
    for axis in range(bits.ndim):
        stride = np.uint32(math.prod(bits.shape[axis + 1 :]) % 2**32)
        index = index + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * stride
    # For a fixed index every operation is invertible, so different bits never mix to the same number.
    mixed = bits + index * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)
