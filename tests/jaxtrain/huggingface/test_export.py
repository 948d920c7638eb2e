"""What is imported is exported again byte for byte, and transformers reads it as we do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from jaxtrain.commands.export import shard_size
from jaxtrain.data import tokenizer as task_tokenizer
from jaxtrain.huggingface.checkpoint import open_checkpoint
from jaxtrain.huggingface.export import export
from jaxtrain.huggingface.layout import DestinationError, ExportFormat
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from jaxtrain.models.sharding_rules import parameter_shardings
from jaxtrain.training.checkpoint import CheckpointError
from jaxtrain.training.saved import export_model, import_model, open_model
from rollout_bridge.quantization import host
from sharding.mesh import MeshSpec
from tests.jaxtrain.huggingface.directories import (
    GLM,
    LLAMA,
    Tensors,
    random_tensors,
    read,
    same_bytes,
    write,
)
from tests.jaxtrain.models.forward import forward, tokens_of
from tests.jaxtrain.models.reference import random_model

SHARD = 300_000


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return MeshSpec(ici={"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}).build()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 model as transformers saves it, in shards, with a tokenizer."""
    directory = tmp_path_factory.mktemp("published") / "model"
    random_model(GLM).save_pretrained(directory, max_shard_size=SHARD)
    task_tokenizer.build(["spell this"], directory)
    return directory


@pytest.fixture(scope="module")
def imported(published: Path, mesh: jax.sharding.Mesh) -> Path:
    return import_model(published, published.with_name("imported"), mesh)


@pytest.fixture(scope="module")
def exported(imported: Path, mesh: jax.sharding.Mesh) -> Path:
    destination = imported.with_name("exported")
    return export_model(imported, destination, mesh, export_format=ExportFormat.F32, shard_bytes=SHARD)


def test_import_then_export_gives_the_same_bytes(published: Path, exported: Path) -> None:
    assert same_bytes(read(published), read(exported))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (exported / name).read_bytes() == (published / name).read_bytes()


def test_shards_are_no_larger_than_asked_and_the_index_finds_every_tensor(exported: Path) -> None:
    files = sorted(exported.glob("*.safetensors"))
    assert len(files) > 2
    assert all(path.stat().st_size < SHARD + 20_000 for path in files)  # and its header
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in files}
    tensors = read(exported)
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in tensors.values())
    open_checkpoint(exported)


def test_transformers_loads_the_export_and_gives_our_logits(imported: Path, exported: Path, mesh) -> None:
    model = open_model(imported)
    config = ModelConfig.from_hf(model.hf_config, compute_dtype="float32")
    definition = define(config)
    one = MeshSpec(ici={"fsdp": 1}).build(jax.devices()[:1])  # another mesh than it was imported on
    params = model.load(definition.shapes, parameter_shardings(definition, one))
    tokens = tokens_of(np.random.default_rng(0), 2, 16)
    ours, _ = forward(params, tokens, config=config)
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens.astype(np.int64))).logits.numpy()
    assert np.abs(ours - expected).max() <= 1e-4 * np.abs(expected).max()


def test_bf16_comes_back_from_float32_masters(tmp_path: Path, mesh) -> None:
    """Signs of zero included, which a sum over shards would lose, and an MTP layer as GLM-4.5 has it.

    Its copies of embedding and head are read by nobody and not written again.
    """
    config = GLM | {"num_nextn_predict_layers": 1}
    tensors = random_tensors(config, torch.bfloat16)
    for name, tensor in tensors.items():
        tensor.view(-1)[::7] = -0.0
        if name.endswith("e_score_correction_bias"):
            tensors[name] = tensor.float()
    layer = f"model.layers.{GLM['num_hidden_layers']}"
    copies = {
        f"{layer}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{layer}.shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    source = write(tmp_path / "model", config, tensors | copies)
    export_model(source, tmp_path / "out", mesh)
    assert same_bytes(read(tmp_path / "out"), tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_fp8_is_the_plan_s_blocks_of_the_bf16_weights(tmp_path: Path, mesh) -> None:
    tensors = random_tensors(LLAMA, torch.float32)
    source = write(tmp_path / "model", LLAMA, tensors)
    export_model(source, tmp_path / "out", mesh, export_format=ExportFormat.FP8)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    found = read(tmp_path / "out")
    name = "model.layers.1.mlp.down_proj.weight"
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert found[name].dtype == torch.float8_e4m3fn
    codes, scales = host.quantize_block_fp8(tensors[name].to(torch.bfloat16).view(torch.uint16).numpy())
    np.testing.assert_array_equal(found[name].view(torch.uint8).numpy(), codes)
    np.testing.assert_array_equal(found[f"{name}_scale_inv"].numpy(), scales)
    embedding = found["model.embed_tokens.weight"]
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"].to(torch.bfloat16))
    assert not any(tensor.dtype == torch.float8_e4m3fn and "layers" not in n for n, tensor in found.items())
    open_checkpoint(tmp_path / "out")


def test_nothing_is_overwritten_and_a_failure_leaves_nothing(published: Path, exported: Path, mesh) -> None:
    before: Tensors = read(exported)
    with pytest.raises(DestinationError, match="exists already"):
        export_model(published, exported, mesh)
    with pytest.raises(DestinationError, match="exists already"):
        import_model(published, exported, mesh)
    assert same_bytes(before, read(exported))

    def broken(path: str) -> jax.Array:
        raise CheckpointError(path)

    there = sorted(os.listdir(exported.parent))
    with pytest.raises(CheckpointError):
        export(exported.with_name("new"), open_checkpoint(published).hf_config, broken, companions=published)
    assert sorted(os.listdir(exported.parent)) == there


def test_a_damaged_import_is_refused(imported: Path, mesh, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected step 7"):
        open_model(imported, 7)
    copy = tmp_path / "copy"
    for path in imported.rglob("*"):
        if path.is_file():
            (copy / path.relative_to(imported)).parent.mkdir(parents=True, exist_ok=True)
            (copy / path.relative_to(imported)).write_bytes(path.read_bytes())
    largest = max((copy / "checkpoints").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(CheckpointError, match="could not be read"):
        export_model(copy, tmp_path / "out", mesh)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500 MB", 5 * 10**8), ("1.5GiB", 3 << 29), ("7", 7)]
)
def test_sizes_of_shards(text: str, size: int) -> None:
    assert shard_size(text) == size
