"""Rows of the word embedding for tokens.

On a mesh the table is split by columns over fsdp and by rows over tensor. Left to the compiler, every device
would look up the tokens of all others; here it looks up those of its fsdp group, whose columns are then
exchanged. Traffic and memory are a few times a device's own activations, whatever the number of devices.
"""

# B rows, S sequence, D model, V vocabulary

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.models.placement import FSDP_AXIS, TENSOR_AXIS, activation_spec, axis_size, spans_devices


def embed(
    table_VD: jax.Array, tokens_BS: jax.Array, *, dtype: jax.typing.DTypeLike, mesh: Mesh | None
) -> jax.Array:
    """[B, S, D] in `dtype`. The gradient is summed in the table's own dtype."""
    if not spans_devices(mesh):
        return table_VD[tokens_BS].astype(dtype)
    columns, rows = axis_size(mesh, FSDP_AXIS), axis_size(mesh, TENSOR_AXIS)

    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        if columns > 1:
            tokens = jax.lax.all_gather(tokens, FSDP_AXIS, axis=0, tiled=True)
        if rows > 1:
            tokens = tokens - jax.lax.axis_index(TENSOR_AXIS) * table.shape[0]
            # Another device's row: out of range, hence 0.
            tokens = jnp.where(tokens < 0, table.shape[0], tokens)
        found = jnp.take(table, tokens, axis=0, mode="fill", fill_value=0).astype(dtype)
        if columns > 1:
            found = jax.lax.all_to_all(found, FSDP_AXIS, split_axis=0, concat_axis=2, tiled=True)
        return found[None] if rows > 1 else found

    tokens = activation_spec(mesh)
    fsdp, tensor = (a if a in mesh.axis_names else None for a in (FSDP_AXIS, TENSOR_AXIS))
    out = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(tensor, fsdp), tokens),
        out_specs=PartitionSpec(tensor, *tokens) if rows > 1 else tokens,
        check_vma=False,
    )(table_VD, tokens_BS)
    # Summed out here, so that the backward pass has nothing to sum over the tensor axis for this output.
    return out.sum(0) if rows > 1 else out
