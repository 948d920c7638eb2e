"""Size and cost of a decoder, computed without a device: parameters, operations, bytes on a device."""

from __future__ import annotations

import math
from typing import Any

import jax

from jaxtrain.models.definition import Definition
from jaxtrain.models.flops import inference_flops, parts, training_flops

OUTER = ("embedding", "lm_head")  # what published counts of a body leave out


def describe(definition: Definition, *, sequence_length: int) -> dict[str, Any]:
    """Parameters by part, total and active (used by one token), and operations for each token.

    body: without embedding, head and MTP layers. flops_per_token: model FLOPs (see `flops`), of tokens of one
    document of `sequence_length`.
    """
    found = parts(definition)
    body = [part for part in found if part.name not in (*OUTER, "mtp")]
    return {
        "parameters": {
            "total": sum(part.parameters for part in found),
            "active": sum(part.active for part in found),
            "body": sum(part.parameters for part in body),
            "body_active": sum(part.active for part in body),
            "parts": {part.name: {"held": part.parameters, "active": part.active} for part in found},
        },
        "sequence_length": sequence_length,
        "flops_per_token": {
            "training": training_flops(definition).at_length(sequence_length),
            "inference": inference_flops(definition).at_length(sequence_length),
        },
    }


def bytes_on_device(tree: Any, shardings: Any) -> int:
    """Bytes of one shard of every array of `tree`, arrays or ShapeDtypeStructs, together."""
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    return sum(math.prod(where.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, where in leaves)
