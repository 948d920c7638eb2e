"""Stretched rotary embeddings against transformers', which needs torch: frequencies, and a whole model."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxtrain.models.config import ModelConfig
from rollout_bridge import architectures
from tests.jaxtrain.models.forward import forward, tokens_of
from tests.jaxtrain.models.reference import parameters, random_model
from tests.jaxtrain.models.tiny import HF_CONFIG, LLAMA, QWEN3

LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "llama3": LLAMA31,
    "yarn": YARN,
    "yarn without rounding": YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn with a factor": YARN | {"attention_factor": 1.3},
    "yarn with mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    "linear": {"rope_type": "linear", "factor": 3.0},
}


def stretched(hf_config: dict, scaling: dict) -> dict:
    return hf_config | {
        "rope_parameters": hf_config.get("rope_parameters", {"rope_theta": hf_config.get("rope_theta")})
        | scaling,
        "max_position_embeddings": 256,
    }


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("theta, dim", [(10_000.0, 64), (500_000.0, 128), (1_000_000.0, 96)])
def test_frequencies_are_those_of_transformers(kind, theta, dim):
    scaling = SCALINGS[kind]
    config = AutoConfig.for_model(
        "llama",
        hidden_size=2 * dim,
        num_attention_heads=2,
        head_dim=dim,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    ours = architectures.read(config.to_dict() | {"model_type": "llama"}).rope_scaling
    assert ours is not None
    np.testing.assert_allclose(ours.frequencies(dim, theta), expected.numpy(), rtol=2e-6)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("base", [LLAMA, QWEN3, HF_CONFIG], ids=["llama", "qwen3", "glm4_moe"])
@pytest.mark.parametrize("kind", ["llama3", "yarn", "linear"])
def test_logits_are_those_of_transformers(base, kind):
    """At positions beyond the original context too. Bound: float32, relative to the largest logit."""
    hf_config = stretched(base, SCALINGS[kind])
    model = random_model(hf_config)
    params = parameters(hf_config, {name: value.numpy() for name, value in model.state_dict().items()})
    tokens = tokens_of(np.random.default_rng(0), 1, 100)
    ones, positions = np.ones_like(tokens), np.arange(100, dtype=np.int32)[None]
    config = ModelConfig.from_hf(hf_config, compute_dtype="float32")
    assert config.rope_scaling is not None
    ours = np.asarray(forward(params, tokens, positions, ones, config=config)[0])
    with torch.no_grad():
        theirs = model(torch.tensor(tokens.astype(np.int64))).logits.numpy()
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
    plain = ModelConfig.from_hf(base | {"max_position_embeddings": 256}, compute_dtype="float32")
    other = np.asarray(forward(params, tokens, positions, ones, config=plain)[0])
    assert np.abs(jnp.asarray(ours - other)).max() > 1e-2 * np.abs(theirs).max(), (
        "the stretch must matter here"
    )


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_what_is_read_is_written_and_means_the_same(spelling):
    """Also the base where older files keep it beside the kind, and where `type` names the kind."""
    old = {key: value for key, value in LLAMA.items() if key not in ("rope_parameters", "rope_theta")}
    scaling = {**LLAMA31, "rope_theta": 500_000.0}
    kind = scaling.pop("rope_type")
    given = old | {spelling: scaling | {"type" if spelling == "rope_scaling" else "rope_type": kind}}
    decoder = architectures.read(given)
    assert decoder.rope_theta == 500_000.0 and decoder.rope_scaling is not None
    written = architectures.write(decoder)
    assert (
        written["rope_parameters"] == {**LLAMA31, "rope_theta": 500_000.0} and "rope_scaling" not in written
    )
    assert architectures.read(written) == decoder
