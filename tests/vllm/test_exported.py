"""vLLM loads what is exported, and says the same of its own samples as the decoder does."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.huggingface.export import export
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define, initialize
from jaxtrain.models.sharding_rules import parameter_shardings
from sharding.mesh import MeshSpec
from tests.vllm import tiny_model

GLM: dict[str, Any] = tiny_model.CONFIG
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 4096,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """What both sides compute in, the standard deviation of the word embedding, and the bound on the mean
    absolute difference of log-probabilities."""

    dtype: str
    embedding: float
    limit: float


# The second says what the first one's difference is made of. Without an embedding that dominates it, the
# residual stream is what layers put out, where rounding to BF16 shows most: 0.02 to 0.03 in BF16.
CASES = [Case("bfloat16", embedding=1.0, limit=0.02), Case("float32", embedding=0.08, limit=1e-5)]


def _scale(path: str, case: Case) -> float:
    """Of initial weights (0.02): logits that deviate by 2, layers that add much to the residual stream."""
    if "norm" in path:
        return 1.0
    return {"embedding": case.embedding / 0.02, "lm_head/kernel": 8.0}.get(path, 3.0)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.dtype)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def models(
    case: Case, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, Any], dict[str, jax.Array]]]:
    """Random weights by directory, exported in BF16, which they are rounded to."""
    root = tmp_path_factory.mktemp("exported")
    mesh = MeshSpec(ici={"fsdp": 1}).build(jax.devices()[:1])
    made = {}
    for hf_config in (GLM, QWEN):
        definition = define(ModelConfig.from_hf(hf_config))
        values = initialize(definition.config, seed=0, shardings=parameter_shardings(definition, mesh))
        params = {
            path: value if path in definition.buffers else rounded(value * _scale(path, case))
            for path, value in values.items()
        }
        directory = export(root / hf_config["model_type"], hf_config, params.__getitem__, companions=root)
        made[str(directory)] = (hf_config, params)
    return made


def rounded(value: jax.Array) -> jax.Array:
    return value.astype(jnp.bfloat16).astype(jnp.float32)


@pytest.fixture(scope="module")
def samples(case: Case, models) -> dict[str, list[dict[str, Any]]]:
    """One process for both: most of the time goes into starting vLLM."""
    program = Path(__file__).with_name("offline_logprobs.py")
    result = subprocess.run(
        [sys.executable, program, case.dtype, *models],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    lines = [
        line.removeprefix("RESULT ") for line in result.stdout.splitlines() if line.startswith("RESULT ")
    ]
    assert len(lines) == len(models), result.stderr[-3000:]
    return dict(zip(models, map(json.loads, lines), strict=True))


@pytest.mark.proof
@pytest.mark.parametrize("architecture", ["glm4_moe", "qwen3_moe"])
def test_log_probabilities_of_its_own_samples_agree(case, models, samples, architecture: str) -> None:
    (directory,) = [d for d in models if Path(d).name == architecture]
    hf_config, params = models[directory]
    config = ModelConfig.from_hf(hf_config, compute_dtype=case.dtype)
    rows = samples[directory]
    length = max(len(row["prompt"]) + len(row["tokens"]) for row in rows)
    ids = np.zeros((len(rows), length), np.int32)
    segments = np.zeros((len(rows), length), np.int32)
    for index, row in enumerate(rows):
        sequence = row["prompt"] + row["tokens"]
        ids[index, : len(sequence)], segments[index, : len(sequence)] = sequence, 1

    @jax.jit
    def table(params: dict[str, jax.Array]) -> jax.Array:
        model = define(config).bind(params)
        positions = jnp.broadcast_to(jnp.arange(length), ids.shape)
        hidden, _ = model(jnp.asarray(ids), positions, jnp.asarray(segments))
        return jax.nn.log_softmax(model.logits(hidden).astype(jnp.float32))

    ours = np.asarray(table(params))
    differences, entropy = [], []
    for index, row in enumerate(rows):
        first = len(row["prompt"])
        at = np.arange(first - 1, first + len(row["tokens"]) - 1)
        differences.append(ours[index, at, row["tokens"]] - np.asarray(row["logprobs"]))
        entropy.append(-(np.exp(ours[index, at]) * ours[index, at]).sum(-1))
    mean = np.abs(np.concatenate(differences)).mean()
    print(f"{architecture} in {case.dtype}: mean absolute difference {mean:.2g}", end="")
    print(f", largest {np.abs(np.concatenate(differences)).max():.2g}, entropy {np.mean(entropy):.2f}")
    assert mean <= case.limit
    assert 0.5 < np.mean(entropy) < 0.95 * np.log(hf_config["vocab_size"])  # neither certain nor uniform
