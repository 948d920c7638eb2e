"""The MTP layers against transformers' MtpLayer, through the published tensor names. Needs torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoConfig
from transformers.modeling_layers import MtpLayer
from transformers.models.glm4_moe.modeling_glm4_moe import (
    Glm4MoeDecoderLayer,
    Glm4MoeRMSNorm,
    Glm4MoeRotaryEmbedding,
)

from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from rollout_bridge import architectures
from tests.jaxtrain.models.forward import perturbed_parameters, tokens_of
from tests.jaxtrain.models.reference import unfused
from tests.jaxtrain.models.tiny import HF_CONFIG

DEPTHS = 2
HF = HF_CONFIG | {"num_nextn_predict_layers": DEPTHS, "num_hidden_layers": 2}


def test_two_depths_equal_transformers():
    """Random layers there, loaded here by `model.layers.{n}` names; the chain of both depths, to 1e-4."""
    torch.manual_seed(0)
    # Layer 0 would be dense in the body; MTP layers all have experts.
    config = AutoConfig.for_model(**(HF | {"first_k_dense_replace": 0}), attn_implementation="eager")
    layers = [MtpLayer(config, Glm4MoeDecoderLayer, Glm4MoeRMSNorm, depth) for depth in range(DEPTHS)]
    state = {}
    for depth, layer in enumerate(layers):
        with torch.no_grad():
            for name, value in layer.state_dict().items():
                value.copy_(torch.randn_like(value) * 0.3 + ("norm" in name) * 1.0)
        for name, value in unfused({n: v.numpy() for n, v in layer.state_dict().items()}).items():
            published = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            state[f"model.layers.{2 + depth}.{published}"] = value
    definition = define(ModelConfig.from_hf(HF, compute_dtype="float32"))
    params = perturbed_parameters(seed=0, config=definition.config)
    body = dict(architectures.from_tree(HF, {path: np.asarray(value) for path, value in params.items()}))
    assert state.keys() <= body.keys()
    params = {p: jnp.asarray(v) for p, v in architectures.to_tree(HF, (body | state).__getitem__).items()}
    rng = np.random.default_rng(1)
    hidden, tokens = rng.normal(size=(2, 9, 64)).astype(np.float32), tokens_of(rng, DEPTHS, 2, 9)
    positions, ones = np.broadcast_to(np.arange(9), (2, 9)), np.ones((2, 9), np.int32)

    @jax.jit
    def ours(params):
        found, _ = definition.bind(params).predict_further(
            jnp.asarray(hidden),
            jnp.asarray(tokens),
            jnp.asarray(positions),
            jnp.asarray(ones),
            counted_nBS=jnp.broadcast_to(ones, tokens.shape),
        )
        return found

    found = ours(params)
    rotary = Glm4MoeRotaryEmbedding(config)
    mask = torch.full((9, 9), -1e30).triu(1)[None, None]
    state_of_depth, embedding = torch.tensor(hidden), torch.tensor(np.asarray(params["embedding"]))
    ids = torch.tensor(np.ascontiguousarray(positions))
    with torch.no_grad():
        for depth, layer in enumerate(layers):
            embedded = embedding[torch.tensor(tokens[depth].astype(np.int64))]
            state_of_depth = layer(
                embedded, state_of_depth, rotary(embedded, ids), mask, position_ids=ids, past_key_values=None
            )
            theirs = state_of_depth.numpy()
            assert np.abs(found[depth] - theirs).max() <= 1e-4 * np.abs(theirs).max()
