"""Random models of transformers, and their weights under our paths. Needs torch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rollout_bridge import architectures


def random_model(hf_config: dict[str, Any]) -> PreTrainedModel:
    """transformers' model of a config.json; no bias is 0, no norm 1, and routers prefer clearly."""
    torch.manual_seed(0)
    values = {key: value for key, value in hf_config.items() if key != "architectures"}
    config = AutoConfig.for_model(**values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    assert type(model).__name__ == hf_config["architectures"][0]
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name == "lm_head.weight" and hf_config["tie_word_embeddings"]:
                continue
            scale = 0.3 if "norm" not in name else 0.1
            value.add_(scale * torch.randn_like(value))
    return model


def unfused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By checkpoint name: transformers fuses experts that checkpoints keep apart."""
    state = {}
    for name, array in tensors.items():
        if name.endswith("experts.gate_up_proj"):
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
    return state


def parameters(hf_config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Our parameters by path from the reference's tensors by its own names."""
    tree = architectures.to_tree(hf_config, unfused(tensors).__getitem__)
    return {path: jnp.asarray(value) for path, value in tree.items()}
