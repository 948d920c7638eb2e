"""Log-probabilities of targets from final hidden states, on one device or on a mesh.

On a mesh every device projects its own tokens: a scan over chunks of all tokens would project each of them
on every device. The head is gathered once; devices of the tensor axis, which hold the same tokens, share
them out.
"""

# B rows, S sequence, N tokens of a device, D model, V vocabulary

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.losses.token_logprobs import TokenLogprobs, token_logprobs
from jaxtrain.models.definition import Definition
from jaxtrain.models.placement import FSDP_AXIS, TENSOR_AXIS, activation_spec, axis_size


def target_logprobs(
    definition: Definition,
    params: Mapping[str, jax.Array],
    hidden_BSD: jax.Array,
    targets_BS: jax.Array,
    *,
    temperature_BS: jax.Array | None = None,
) -> TokenLogprobs:
    """`token_logprobs` of all tokens, arrays [N] in the order of `targets_BS.reshape(-1)`.

    Axes may precede the rows, the same in all arguments.
    """
    head_DV = definition.head(params)
    if definition.mesh is None:
        return token_logprobs(
            hidden_BSD.reshape(-1, hidden_BSD.shape[-1]),
            head_DV,
            targets_BS.reshape(-1),
            temperature_N=None if temperature_BS is None else temperature_BS.reshape(-1),
        )
    temperature_BS = jnp.ones(targets_BS.shape, jnp.float32) if temperature_BS is None else temperature_BS
    out = _on_mesh(hidden_BSD, head_DV.astype(hidden_BSD.dtype), targets_BS, temperature_BS, definition.mesh)
    return jax.tree.map(lambda x: x.reshape(-1), out)


def _on_mesh(
    hidden_BSD: jax.Array, head_DV: jax.Array, targets_BS: jax.Array, temperature_BS: jax.Array, mesh: Mesh
) -> TokenLogprobs:
    shared_by = axis_size(mesh, TENSOR_AXIS)

    def local(
        hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: jax.Array
    ) -> TokenLogprobs:
        for axis, dimension in ((FSDP_AXIS, 0), (TENSOR_AXIS, 1)):
            if axis_size(mesh, axis) > 1:
                head = jax.lax.all_gather(head, axis, axis=dimension, tiled=True)
        tokens = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), temperature.reshape(-1))
        if shared_by == 1:
            out = token_logprobs(tokens[0], head, tokens[1], temperature_N=tokens[2])
        else:
            hidden_ND, targets_N, temperature_N = (_own_share(x, shared_by) for x in tokens)
            # Padding has temperature 0: any positive one will do.
            out = token_logprobs(
                hidden_ND, head, targets_N, temperature_N=jnp.where(temperature_N > 0, temperature_N, 1)
            )
            out = jax.tree.map(lambda x: jax.lax.all_gather(x, TENSOR_AXIS, tiled=True), out)
        return jax.tree.map(lambda x: x[: targets.size].reshape(targets.shape), out)

    rows = PartitionSpec(*(None for _ in targets_BS.shape[2:]), *activation_spec(mesh))
    fsdp, tensor = (axis if axis in mesh.axis_names else None for axis in (FSDP_AXIS, TENSOR_AXIS))
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, PartitionSpec(fsdp, tensor), rows, rows),
        out_specs=rows,
        check_vma=False,
    )(hidden_BSD, head_DV, targets_BS, temperature_BS)


def _own_share(x_Nx: jax.Array, shared_by: int) -> jax.Array:
    """This device's run of ceil(N / shared_by) tokens, filled up with zeros."""
    size = -(-x_Nx.shape[0] // shared_by)
    padded = jnp.pad(x_Nx, ((0, size * shared_by - x_Nx.shape[0]), *((0, 0) for _ in x_Nx.shape[1:])))
    return jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index(TENSOR_AXIS) * size, size)
