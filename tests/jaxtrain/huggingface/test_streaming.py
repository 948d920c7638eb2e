"""Parameters on a mesh are what the files hold, on any mesh, and the host holds one tensor at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from jaxtrain.huggingface.checkpoint import HuggingFaceCheckpoint, open_checkpoint
from jaxtrain.huggingface.errors import HuggingFaceError
from jaxtrain.huggingface.reading import TruncatedError
from jaxtrain.huggingface.streaming import load_parameters
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from jaxtrain.models.sharding_rules import parameter_shardings
from rollout_bridge import architectures
from sharding.mesh import MeshSpec
from tests.jaxtrain.huggingface.directories import FP8, GLM, LLAMA, quantized, random_tensors, stacked, write

ONE = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}


def load(checkpoint: HuggingFaceCheckpoint, **axes: int) -> dict[str, jax.Array]:
    devices = jax.devices()[: int(np.prod(list(axes.values()) or [1]))]
    mesh = MeshSpec(ici=ONE | axes).build(devices)
    definition = define(ModelConfig.from_hf(checkpoint.hf_config))
    return load_parameters(checkpoint, definition.shapes, parameter_shardings(definition, mesh))


@pytest.mark.parametrize(
    ("config", "dtype", "axes"),
    [
        (LLAMA, torch.float32, {}),
        (GLM, torch.bfloat16, {"fsdp": 2, "expert": 2, "tensor": 2}),
        (LLAMA, torch.float16, {"fsdp": 8}),
    ],
    ids=["float32", "bfloat16 on 2x2x2", "float16 on 8"],
)
def test_parameters_are_the_tensors_of_the_files(
    tmp_path: Path, config: dict[str, Any], dtype: torch.dtype, axes: dict[str, int]
) -> None:
    tensors = random_tensors(config, dtype)
    params = load(open_checkpoint(write(tmp_path / "model", config, tensors, shards=3)), **axes)
    expected = stacked(config, tensors)
    assert params.keys() == expected.keys()
    for path, value in expected.items():
        assert params[path].dtype == np.float32
        np.testing.assert_array_equal(params[path], value, err_msg=path)
        assert params[path].sharding.num_devices == int(np.prod(list(axes.values()) or [1]))
    shards = {path: value.addressable_shards[0].data.shape for path, value in params.items()}
    if config is GLM:  # [layers, experts, model, hidden]
        assert shards["moe/mlp/experts/up_proj"] == (2, 4, 32, 16)


def test_fp8_is_multiplied_out_to_float32(tmp_path: Path) -> None:
    """Blocks at the edges are partial, shards begin inside of blocks, and scales are any numbers."""
    stored, meant = quantized(random_tensors(LLAMA, torch.bfloat16))
    directory = write(tmp_path / "model", LLAMA | {"quantization_config": FP8}, stored)
    params = load(open_checkpoint(directory), fsdp=2, tensor=2)
    for path, value in stacked(LLAMA, meant).items():
        np.testing.assert_array_equal(params[path], value, err_msg=path)


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA, torch.bfloat16)
    tensors["model.layers.1.mlp.up_proj.weight"][319, 191] = float("nan")
    with pytest.raises(HuggingFaceError, match="dense/mlp/up_proj/kernel: holds NaN") as caught:
        load(open_checkpoint(write(tmp_path / "model", LLAMA, tensors)), fsdp=2)
    assert len(caught.value.problems) == 1


def test_a_file_that_shrinks_after_the_check(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", LLAMA, random_tensors(LLAMA, torch.bfloat16))
    checkpoint = open_checkpoint(directory)
    with open(directory / "model.safetensors", "r+b") as file:
        file.truncate(100_000)
    with pytest.raises(TruncatedError, match=r"ends before byte \d+, inside model.*: it changed"):
        load(checkpoint)


MEMORY = """
import json, resource, sys
from pathlib import Path
import jax
from jaxtrain.huggingface.checkpoint import open_checkpoint
from jaxtrain.huggingface.streaming import load_parameters
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from jaxtrain.models.sharding_rules import parameter_shardings
from sharding.mesh import MeshSpec

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def load(directory):
    checkpoint = open_checkpoint(Path(directory))
    definition = define(ModelConfig.from_hf(checkpoint.hf_config))
    shardings = parameter_shardings(definition, MeshSpec(ici={"fsdp": 1}).build(jax.devices()[:1]))
    return sum(value.nbytes for value in load_parameters(checkpoint, definition.shapes, shardings).values())

load(sys.argv[1])
before = peak()
size = load(sys.argv[2])
print(json.dumps({"parameters": size, "growth": peak() - before}))
"""


def test_host_memory_is_bounded_by_a_tensor_not_by_a_stack(tmp_path: Path) -> None:
    """Parameters take their own memory here, on a CPU device; beyond it there is room for tensors, not for a
    stack of experts, which are 96 MiB each. The small model goes first: what jax itself takes is not counted.
    """
    small = GLM | {"hidden_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 2}
    large = small | {"num_hidden_layers": 7, "n_routed_experts": 16}
    for name, config in (("small", small), ("large", large)):
        ones = {s.name: torch.ones(s.shape, dtype=torch.bfloat16) for s in architectures.tensors(config)}
        write(tmp_path / name, config, ones, shards=2)
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path / "small", tmp_path / "large"],
        env=os.environ | {"XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found = json.loads(result.stdout)
    stack = 4 * 6 * 16 * 512 * 512
    assert found["parameters"] > 3 * stack
    assert found["growth"] - found["parameters"] < stack / 3
