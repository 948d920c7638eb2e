"""A tiny random Glm4Moe as canonical tensors, mirrors that hold it, and directories a server can load.

Everything a directory needs is computed here from the definition (value = code * scale, in torch), apart from
the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from rollout_bridge import architectures
from rollout_bridge.architectures.tensors import paths, stacked_shape
from rollout_bridge.quantization.digest import digest
from rollout_bridge.quantization.plan import Format, plan_for, scale_name
from rollout_bridge.weights.format.manifest import ManifestRef
from rollout_bridge.weights.format.run import RunInfo
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.mirror_view import MirrorState, layout

CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": True,
    "use_qk_norm": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Tensors = dict[str, torch.Tensor]


def run_info() -> RunInfo:
    return RunInfo.new(CONFIG, plan_for(architectures.tensors(CONFIG), serving=None))


def random_tensors(run: RunInfo, seed: int, wanted: Callable[[str], bool] = lambda name: True) -> Tensors:
    """Canonical tensors (float8_e4m3fn with scales, bfloat16, float32) of the wanted Hugging Face names."""
    tensors: Tensors = {}
    for offset, source in enumerate(run.sources):
        name = source.name
        if not wanted(name):
            continue
        values = torch.randn(source.shape, generator=torch.Generator().manual_seed(1000 * seed + offset))
        form = run.plan.formats[name]
        if name.endswith("norm.weight"):
            tensors[name] = (1 + 0.1 * values).to(torch.bfloat16)
        elif form is Format.f32:
            tensors[name] = 0.1 * values
        elif form is Format.fp8_block:
            tensors[name], tensors[scale_name(name)] = _quantize(2 * values * source.shape[-1] ** -0.5)
        else:
            tensors[name] = (values * (0.1 if name.endswith("bias") else 0.3)).to(torch.bfloat16)
    return tensors


def random_params(run: RunInfo, *, seed: int) -> dict[str, np.ndarray]:
    """Parameters with logits that deviate by about 2, so that versions are told apart by any token."""
    random = np.random.default_rng(seed)
    shapes = {path: stacked_shape(group) for path, group in paths(run.sources).items()}
    return {
        path: (
            1 + 0.1 * random.standard_normal(shape)
            if "norm" in path
            else 2 * shape[-2 if len(shape) > 1 else -1] ** -0.5 * random.standard_normal(shape)
        ).astype(np.float32)
        for path, shape in shapes.items()
    }


def _blocks(shape: torch.Size) -> list[tuple[int, int, slice, slice]]:
    return [
        (i, j, slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        for i in range(-(-shape[0] // 128))
        for j in range(-(-shape[1] // 128))
    ]


def _quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.zeros(values.shape, dtype=torch.float8_e4m3fn)
    scales = torch.ones((-(-values.shape[0] // 128), -(-values.shape[1] // 128)))
    for i, j, rows, columns in _blocks(values.shape):
        block = values[rows, columns]
        scales[i, j] = 2.0 ** torch.ceil(torch.log2(block.abs().max() / 448.0))
        codes[rows, columns] = (block / scales[i, j]).to(codes.dtype)
    return codes, scales


def bfloat16_weights(tensors: Tensors) -> Tensors:
    """What a BF16 checkpoint of the same numbers holds."""
    scales = {scale_name(name): name for name in tensors if scale_name(name) in tensors}
    weights: Tensors = {}
    for name, tensor in tensors.items():
        if name in scales:
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            wide = tensor.to(torch.float32)
            for i, j, rows, columns in _blocks(tensor.shape):
                wide[rows, columns] *= tensors[scale_name(name)][i, j]
            tensor = wide.to(torch.bfloat16)
        weights[name] = tensor.contiguous()
    return weights


def write_checkpoint(directory: Path, tensors: Tensors) -> Path:
    """The Hugging Face directory that a cold start loads, without any code of the weight chain."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(bfloat16_weights(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Unsigned bits, as the mirror keeps them."""
    signed = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).numpy()
    return signed.view(f"u{tensor.element_size()}")


def set_mirror(mirror: Mirror, run: RunInfo, tensors: Tensors, version: int) -> None:
    """Move a mirror to `version` with these tensors."""
    mirror.bind(run)
    canonical = {name: bits(tensor) for name, tensor in tensors.items()}
    state = MirrorState(
        ManifestRef(version=version, incarnation=1, hash=f"{version:064x}"),
        step=version,
        digests={name: digest(value) for name, value in canonical.items()},
    )

    def fill(file: Path) -> None:
        data = np.memmap(file, mode="r+", dtype=np.uint8)
        for name, offset in layout(run.tensors)[0].items():
            data[offset : offset + canonical[name].nbytes] = canonical[name].view(np.uint8).reshape(-1)
        data.flush()

    mirror.replace(run, state, fill)
