"""Every architecture against transformers' implementation, which needs torch.

Bounds: float32, relative to the largest magnitude; 1e-4 for logits, 1e-3 for each parameter's gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoConfig

from jaxtrain.losses.token_logprobs import token_logprobs
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from tests.jaxtrain.models.forward import forward, tokens_of
from tests.jaxtrain.models.reference import parameters, random_model
from tests.jaxtrain.models.tiny import HF_CONFIGS


@pytest.fixture(scope="module", params=HF_CONFIGS)
def pair(request):
    """(config.json, the reference, its weights as our parameters)."""
    hf_config = HF_CONFIGS[request.param]
    model = random_model(hf_config)
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    return hf_config, model, parameters(hf_config, state)


def test_logits_equal_transformers_padded_and_packed(pair):
    """One call holds a whole row, a padded one, and one with two documents and padding; the reference sees
    each document alone, or padded under an attention mask."""
    hf_config, model, params = pair
    config = ModelConfig.from_hf(hf_config, compute_dtype="float32")
    rng = np.random.default_rng(0)
    tokens = tokens_of(rng, 3, 24)
    segments = np.array([[1] * 24, [1] * 15 + [0] * 9, [1] * 8 + [2] * 13 + [0] * 3], np.int32)
    positions = np.array([[*range(24)], [*range(24)], [*range(8), *range(13), *range(3)]], np.int32)
    ours, _ = forward(params, tokens, positions, segments, config=config)
    ids = torch.tensor(tokens.astype(np.int64))
    with torch.no_grad():
        mask = torch.tensor((segments[:2] > 0).astype(np.int64))
        rows = model(ids[:2], attention_mask=mask).logits.numpy()
        documents = [model(ids[2:, part]).logits.numpy() for part in (slice(0, 8), slice(8, 21))]
    scale = 1e-4 * np.abs(rows).max()
    assert np.abs(ours[0] - rows[0]).max() <= scale
    assert np.abs(ours[1, :15] - rows[1, :15]).max() <= scale
    assert np.abs(ours[2, :8] - documents[0][0]).max() <= scale
    assert np.abs(ours[2, 8:21] - documents[1][0]).max() <= scale


def test_gradients_equal_torch(pair):
    """Of every parameter, through the checkpoint names; a tied embedding's holds the head's part."""
    hf_config, model, params = pair
    definition = define(ModelConfig.from_hf(hf_config, compute_dtype="float32"))
    trained = {path: value for path, value in params.items() if path not in definition.buffers}
    buffers = {path: params[path] for path in definition.buffers}
    tokens = tokens_of(np.random.default_rng(1), 2, 16)

    def loss(trained):
        params = {**trained, **buffers}
        ids = jnp.asarray(tokens)
        positions = jnp.broadcast_to(jnp.arange(15), (2, 15))
        hidden, _ = definition.bind(params)(ids[:, :-1], positions, jnp.ones((2, 15), jnp.int32))
        out = token_logprobs(
            hidden.reshape(-1, hidden.shape[-1]), definition.head(params), ids[:, 1:].reshape(-1), chunk=7
        )
        return -out.logprobs.mean()

    value, gradients = jax.jit(jax.value_and_grad(loss))(trained)
    ids = torch.tensor(tokens.astype(np.int64))
    model.zero_grad()
    their_loss = model(ids, labels=ids).loss
    their_loss.backward()
    assert float(value) == pytest.approx(their_loss.item(), rel=1e-5)
    their_gradients = {
        name: value.new_zeros(value.shape).numpy() if value.grad is None else value.grad.numpy()
        for name, value in model.named_parameters()
    } | {name: value.numpy() for name, value in model.named_buffers()}
    expected = parameters(hf_config, their_gradients)
    assert gradients.keys() == expected.keys() - definition.buffers
    for path, gradient in gradients.items():
        largest = np.abs(expected[path]).max()
        assert largest > 0, path
        assert np.abs(gradient - expected[path]).max() <= 1e-3 * largest, path


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_what_transformers_saves_is_read_alike(name: str):
    """Oracle: the config.json that transformers 5 writes, which moves and renames fields."""
    saved = AutoConfig.for_model(**HF_CONFIGS[name]).to_dict()
    if saved.get("num_nextn_predict_layers", saved.get("num_mtp_layers")) and name.startswith("glm4_moe"):
        # transformers' default is one such layer, whose tensors it neither makes nor saves.
        saved = {k: v for k, v in saved.items() if k not in ("num_nextn_predict_layers", "num_mtp_layers")}
    assert ModelConfig.from_hf(saved) == ModelConfig.from_hf(HF_CONFIGS[name])
