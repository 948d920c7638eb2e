"""Hugging Face directories made with torch and safetensors, apart from the code under test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rollout_bridge import architectures
from tests.jaxtrain.models.tiny import HF_CONFIG

Tensors = dict[str, torch.Tensor]
# Head and vocabulary divide among 8 devices, matrices are no multiples of 128.
GLM = HF_CONFIG | {"num_key_value_heads": 4}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def random_tensors(hf_config: dict[str, Any], dtype: torch.dtype, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        source.name: (0.3 * torch.randn(source.shape, generator=generator)).to(dtype)
        for source in architectures.tensors(hf_config)
    }


def write(directory: Path, hf_config: dict[str, Any], tensors: Tensors, *, shards: int = 1) -> Path:
    """A directory with an index if there is more than one shard, every `shards`-th tensor in the same."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(hf_config))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def read(directory: Path) -> Tensors:
    """Every tensor of a directory, by the safetensors library."""
    tensors: Tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert name not in tensors
                tensors[name] = file.get_tensor(name)
    return tensors


def same_bytes(first: Tensors, second: Tensors) -> bool:
    def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.dtype == b.dtype and torch.equal(
            a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
        )

    return first.keys() == second.keys() and all(equal(first[name], second[name]) for name in first)


def stacked(hf_config: dict[str, Any], tensors: Tensors) -> dict[str, np.ndarray]:
    """The parameters these tensors are, float32."""
    return architectures.to_tree(hf_config, lambda name: tensors[name].float().numpy())


def quantized(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Matrices of layers in FP8 blocks with arbitrary scales, and the numbers they stand for."""
    stored, meant = dict(tensors), {name: value.float() for name, value in tensors.items()}
    for name, value in tensors.items():
        if value.ndim != 2 or "layers" not in name or ".gate." in name:
            continue
        rows, columns = (-(-size // 128) for size in value.shape)
        scale = 0.001 * (1 + torch.rand(rows, columns, generator=torch.Generator().manual_seed(len(name))))
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: value.shape[0], : value.shape[1]]
        codes = (value.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored |= {name: codes, f"{name}_scale_inv": scale}
        meant[name] = codes.float() * wide
    return stored, meant


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
