"""Every architecture against transformers' implementation, which needs torch.

Bounds: float32, relative to the largest magnitude; 1e-4 for logits, 1e-3 for each parameter's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

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


@dataclass(frozen=True)
class Pass:
    """Results of both sides, of valid tokens alone and in the same order.

    logits: float32 [token, vocabulary]. experts: ids in ascending order [MoE layer, token, k].
    """

    logits: np.ndarray
    experts: np.ndarray


@pytest.fixture(scope="module")
def passes(pair) -> tuple[Pass, Pass]:
    """Ours and the reference's. One call of ours holds a whole row, a padded one, and one with two documents
    and padding; the reference sees each document alone, or padded under an attention mask."""
    hf_config, model, params = pair
    config = ModelConfig.from_hf(hf_config, compute_dtype="float32")
    tokens = tokens_of(np.random.default_rng(0), 3, 24)
    segments = np.array([[1] * 24, [1] * 15 + [0] * 9, [1] * 8 + [2] * 13 + [0] * 3], np.int32)
    positions = np.array([[*range(24)], [*range(24)], [*range(8), *range(13), *range(3)]], np.int32)
    logits, router = forward(params, tokens, positions, segments, config=config, return_experts=True)
    valid = segments > 0
    ours = Pass(np.asarray(logits)[valid], np.sort(np.moveaxis(np.asarray(router.experts)[valid], 1, 0)))
    ids = torch.tensor(tokens.astype(np.int64))
    parts = [
        reference_pass(model, ids[:2], valid[:2]),
        reference_pass(model, ids[2:, :8]),
        reference_pass(model, ids[2:, 8:21]),
    ]
    theirs = Pass(
        np.concatenate([part.logits for part in parts]),
        np.concatenate([part.experts for part in parts], axis=1),
    )
    return ours, theirs


def reference_pass(model: PreTrainedModel, ids: torch.Tensor, valid: np.ndarray | None = None) -> Pass:
    """transformers' pass over rows of one document each. Experts are what its routers hand to the experts."""
    valid = np.ones(tuple(ids.shape), bool) if valid is None else valid
    chosen = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_hook(lambda *call: chosen.append(call[-1][-1])) for router in routers]
    with torch.no_grad():
        logits = model(ids, attention_mask=torch.tensor(valid.astype(np.int64))).logits.numpy()
    for hook in hooks:
        hook.remove()
    k = chosen[0].shape[-1] if chosen else 0
    experts = [np.sort(layer.numpy().reshape(*valid.shape, -1)[valid]) for layer in chosen]
    return Pass(logits[valid], np.stack(experts) if experts else np.zeros((0, int(valid.sum()), k), int))


def test_logits_equal_transformers_padded_and_packed(passes):
    ours, theirs = passes
    assert np.abs(ours.logits - theirs.logits).max() <= 1e-4 * np.abs(theirs.logits).max()


def test_routers_choose_the_experts_that_transformers_chooses(pair, passes):
    """Every token, every layer: the same set of ids; and not one set for all."""
    ours, theirs = passes
    config = ModelConfig.from_hf(pair[0])
    assert ours.experts.shape[::2] == (config.num_moe_layers, config.num_experts_per_tok)
    np.testing.assert_array_equal(ours.experts, theirs.experts)
    for layer in ours.experts:
        assert len(np.unique(layer, axis=0)) >= 5


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
