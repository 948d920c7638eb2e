"""The decoder against transformers' Glm4MoeForCausalLM, which needs torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from jaxtrain.losses.token_logprobs import token_logprobs
from jaxtrain.models.definition import define
from rollout_bridge import names
from tests.jaxtrain.models.forward import CONFIG, forward, tokens_of
from tests.jaxtrain.models.tiny import HF_CONFIG


@pytest.fixture(scope="module")
def reference() -> Glm4MoeForCausalLM:
    torch.manual_seed(0)
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**HF_CONFIG)).eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            scale = 0.3 if "norm" not in name else 0.1
            value.add_(scale * torch.randn_like(value))
    return model


@pytest.fixture(scope="module")
def params(reference: Glm4MoeForCausalLM) -> dict[str, jax.Array]:
    """The reference's weights under our paths, through the checkpoint names."""
    state = {}
    for name, value in reference.state_dict().items():
        array = value.numpy()
        if name.endswith("experts.gate_up_proj"):  # transformers fuses what checkpoints keep apart
            stem = name.removesuffix("gate_up_proj")
            for expert, fused in enumerate(array):
                gate, up = np.split(fused, 2)
                state[f"{stem}{expert}.gate_proj.weight"], state[f"{stem}{expert}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            for expert, down in enumerate(array):
                state[f"{stem}{expert}.down_proj.weight"] = down
        else:
            state[name] = array
    return {path: jnp.asarray(v) for path, v in names.to_tree(HF_CONFIG, state.__getitem__).items()}


def test_logits_equal_transformers(reference, params):
    tokens = tokens_of(np.random.default_rng(0), 3, 24)
    ours, _ = forward(params, tokens)
    with torch.no_grad():
        theirs = reference(torch.tensor(tokens.astype(np.int64))).logits.numpy()
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


def test_gradients_equal_torch(reference, params):
    tokens = tokens_of(np.random.default_rng(1), 2, 16)

    def loss(params):
        model = define(CONFIG).bind(params)
        ids = jnp.asarray(tokens)
        positions = jnp.broadcast_to(jnp.arange(15), (2, 15))
        hidden, _ = model(ids[:, :-1], positions, jnp.ones((2, 15), jnp.int32))
        out = token_logprobs(
            hidden.reshape(-1, 64), params["lm_head/kernel"], ids[:, 1:].reshape(-1), chunk=7
        )
        return -out.logprobs.mean()

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    ids = torch.tensor(tokens.astype(np.int64))
    reference.zero_grad()
    their_loss = reference(ids, labels=ids).loss
    their_loss.backward()
    assert float(value) == pytest.approx(their_loss.item(), rel=1e-5)
    for ours, theirs in (
        (gradients["embedding"], reference.model.embed_tokens.weight.grad),
        (
            gradients["moe/attention/q_proj/kernel"][1].T,
            reference.model.layers[2].self_attn.q_proj.weight.grad,
        ),
        (gradients["moe/mlp/router/kernel"][0].T, reference.model.layers[1].mlp.gate.weight.grad),
        (gradients["moe/mlp/experts/down_proj"][1].mT, reference.model.layers[2].mlp.experts.down_proj.grad),
        (gradients["lm_head/kernel"].T, reference.lm_head.weight.grad),
    ):
        theirs = theirs.numpy()
        assert np.abs(ours - theirs).max() <= 1e-3 * np.abs(theirs).max()
