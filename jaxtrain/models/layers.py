"""A stack of identical pre-norm layers, dense or mixture-of-experts, run by `lax.scan`."""

# B batch, S sequence, D model

from __future__ import annotations

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxtrain.models.attention import Attention
from jaxtrain.models.config import ModelConfig, Remat
from jaxtrain.models.expert_parallel import parallel_experts
from jaxtrain.models.experts import Experts
from jaxtrain.models.mlp import SwiGLU
from jaxtrain.models.norm import rms_norm
from jaxtrain.models.parameters import ones, parameter
from jaxtrain.models.router import Router, Routing


class MoE(nnx.Module):
    """Router, routed experts and shared experts."""

    mesh: Mesh | None = None  # set by Definition.bind

    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, layers: int) -> None:
        self.config = config
        self.router = Router(rngs, config, layers)
        self.experts = Experts(rngs, config, layers)
        if config.n_shared_experts:
            hidden = config.n_shared_experts * config.moe_intermediate_size
            self.shared = SwiGLU(rngs, layers, config.hidden_size, hidden, stddev=config.initializer_range)

    def __call__(self, x_BSD: jax.Array) -> tuple[jax.Array, Routing]:
        """[B, S, D], and the routing of N = B * S tokens; on a mesh its arrays keep [B, S] apart."""
        if self.mesh is not None:
            return self._on_mesh(x_BSD, self.mesh)
        x_ND = x_BSD.reshape(-1, x_BSD.shape[-1])
        routing = self.router(x_ND)
        out = self.experts(x_ND, routing)
        if self.config.n_shared_experts:
            out = out + self.shared(x_ND)
        return out.reshape(x_BSD.shape), routing

    def _on_mesh(self, x_BSD: jax.Array, mesh: Mesh) -> tuple[jax.Array, Routing]:
        """Rows and sequence are split over different axes, so flattening them would move tokens about."""
        routing = jax.vmap(self.router)(x_BSD)
        kernels = (self.experts.gate_proj, self.experts.up_proj, self.experts.down_proj)
        out = parallel_experts(
            x_BSD,
            routing.ids,
            routing.weights,
            *(kernel[...].astype(x_BSD.dtype) for kernel in kernels),
            mesh=mesh,
            implementation=self.config.expert_implementation,
        )
        if self.config.n_shared_experts:
            out = out + self.shared(x_BSD)
        return out, routing


class Layers(nnx.Module):
    """A stack of identical pre-norm layers, parameters stacked on a leading axis."""

    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, layers: int, *, moe: bool) -> None:
        self.config = config
        d, std = config.hidden_size, config.initializer_range
        self.input_norm = parameter(rngs, (layers, d), ("layers", "embed_norm"), ones)
        self.attention = Attention(rngs, config, layers)
        self.post_attention_norm = parameter(rngs, (layers, d), ("layers", "embed_norm"), ones)
        self.mlp = (
            MoE(rngs, config, layers)
            if moe
            else SwiGLU(rngs, layers, d, config.intermediate_size, stddev=std)
        )

    def feed_forward(self, x_BSD: jax.Array) -> tuple[jax.Array, Routing | None]:
        normed = rms_norm(x_BSD, self.post_attention_norm[...], eps=self.config.rms_norm_eps)
        out = self.mlp(normed)
        y, routing = out if isinstance(out, tuple) else (out, None)
        return x_BSD + y, routing


def scan_layers(stack: Layers, body, carry, *, remat: Remat):
    """Runs `body(layer, carry) -> (carry, output)` over the stacked layers with `lax.scan`."""
    graphdef, state = nnx.split(stack)

    def step(carry, layer_state):
        return body(nnx.merge(graphdef, layer_state), carry)

    if remat is Remat.FULL:
        step = jax.checkpoint(step)
    elif remat is Remat.DOTS:
        step = jax.checkpoint(step, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    return jax.lax.scan(step, carry, state)
