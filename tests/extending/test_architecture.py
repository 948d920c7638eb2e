"""docs/extending/examples/mixtral.py, a family in a file outside the packages, works from config alone.

Oracle: transformers' Mixtral.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.load import load_config
from jaxtrain.config.model import MeshSection
from jaxtrain.config.optimization import OptimizerSection
from jaxtrain.data.packing import Document, pack
from jaxtrain.huggingface.checkpoint import open_checkpoint
from jaxtrain.huggingface.errors import HuggingFaceError
from jaxtrain.losses.next_token import NextToken
from jaxtrain.models.config import ModelConfig
from jaxtrain.training.build import mesh_of, trainable_of
from jaxtrain.training.checkpoint_reader import CheckpointReader
from jaxtrain.training.phase import ScheduledValues
from jaxtrain.training.programs import train_step
from jaxtrain.training.saved import import_model, open_model
from jaxtrain.training.state import state_of
from rollout_bridge import architectures
from rollout_bridge.architectures import REFERENCE
from rollout_bridge.store import Store
from rollout_bridge.weights.format import run as runs
from rollout_bridge.weights.format.chain import read_latest
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.subscriber import Subscriber
from tests.extending.examples import EXAMPLES, jaxtrain
from tests.jaxtrain.models.forward import forward, tokens_of
from tests.jaxtrain.models.reference import random_model

CONFIG = EXAMPLES / "mixtral.yaml"
NAME = "mixtral:MIXTRAL"
HF_CONFIG: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "sliding_window": None,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, Any]:
    """A directory that transformers saved, and its model."""
    model = random_model(HF_CONFIG)
    directory = tmp_path_factory.mktemp("published")
    model.save_pretrained(directory)
    return directory, model


def test_logits_of_a_published_directory_equal_transformers(published):
    """float32, 1e-4 of the largest logit, as for the families that are built in."""
    directory, model = published
    checkpoint = open_checkpoint(directory, NAME)
    rows = {source.name: source.shape[0] for source in checkpoint.sources}
    tree = architectures.to_tree(
        checkpoint.hf_config, lambda name: checkpoint.rows(name, 0, rows[name]).astype(np.float32)
    )
    tokens = tokens_of(np.random.default_rng(0), 2, 24)
    config = ModelConfig.from_hf(checkpoint.hf_config, compute_dtype="float32")
    ours, _ = forward({path: jnp.asarray(value) for path, value in tree.items()}, tokens, config=config)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens.astype(np.int64))).logits.numpy()
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


def test_config_json_out_and_in_gives_the_decoder_back():
    decoder = architectures.read(HF_CONFIG | {REFERENCE: NAME})
    written = architectures.write(decoder)
    assert architectures.read(written) == decoder
    assert written[REFERENCE] == NAME
    assert {name: written[name] for name in HF_CONFIG} == HF_CONFIG


def test_what_is_not_implemented_is_refused(published, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG | {"sliding_window": 64}))
    with pytest.raises(ConfigError, match=r"sliding_window: 64 is not supported, expected None"):
        load_config(CONFIG, [f"model={{checkpoint: {tmp_path}, architecture: {NAME}}}"])
    with pytest.raises(HuggingFaceError, match="model_type: 'mixtral' is not supported, expected 'llama'"):
        open_checkpoint(published[0], "llama")
    with pytest.raises(ConfigError, match="architecture 'mixtral' is unknown"):
        load_config(CONFIG, [f"model={{checkpoint: {published[0]}}}"])
    with pytest.raises(ConfigError, match=r"mixtral\.py has no 'MIXTRL'; did you mean 'MIXTRAL'"):
        load_config(CONFIG, ["model.architecture=mixtral:MIXTRL"])


def test_a_published_config_json_names_no_code(published, tmp_path):
    """A module that a downloaded directory names is not imported; one that the user names is."""
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG | {REFERENCE: "antigravity:fly"}))
    with pytest.raises(HuggingFaceError, match="architecture 'mixtral' is unknown"):
        open_checkpoint(tmp_path)
    assert "antigravity" not in sys.modules


def loaded_by_transformers(directory: Path) -> None:
    """It is an ordinary directory: every tensor has its place, and nothing of ours is in config.json."""
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert type(model).__name__ == "MixtralForCausalLM"
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert REFERENCE not in json.loads((directory / "config.json").read_text())


def test_an_imported_directory_is_trained(published, tmp_path, one_device):
    """The first loss is the one that transformers computes, and a step on the same tokens lowers it."""
    directory, model = published
    mesh = mesh_of(MeshSection())
    imported = open_model(import_model(directory, tmp_path / "imported", mesh, architecture=NAME))
    config = ModelConfig.from_hf(imported.hf_config, compute_dtype="float32")
    trainable = trainable_of(OptimizerSection(), config, mesh)
    placement, loss = trainable.placement, NextToken()
    values = imported.load(trainable.definition.shapes, placement.state.model)
    state = state_of(values, trainable.optimizer, placement)
    tokens = tokens_of(np.random.default_rng(0), 2, 25)
    documents = [Document(tokens=row, loss_weights=np.ones(25, np.float32)) for row in tokens]
    batch = pack(documents, rows=2, sequence_length=24)
    programs = trainable.programs(loss, rows=2, sequence_length=24)
    scales = ScheduledValues(learning_rate=1e-2, router_bias_rate=0.0, balance_weight=0.0, mtp_weight=0.0)
    state, first = train_step(programs, placement, state, batch, scales)
    _, second = train_step(programs, placement, state, batch, scales)
    ids = torch.tensor(tokens.astype(np.int64))
    with torch.no_grad():
        expected = model(ids, labels=ids).loss.item()
    assert first.values["loss"] == pytest.approx(expected, rel=1e-4)
    assert second.values["loss"] < first.values["loss"]


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_trained_published_exported_and_imported(tmp_path):
    run = tmp_path / "mixtral"
    jaxtrain("quickstart", "--config", CONFIG, f"runs_dir={tmp_path}", here=tmp_path)
    store = Store.open(str(run / "store"), probe=False)
    info, latest = runs.load(store), read_latest(store)
    assert info is not None and info.hf_config[REFERENCE] == NAME
    assert latest is not None and latest.step == 4  # two supervised and two RL steps
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in info.plan.formats

    subscriber = Subscriber(store, Mirror(tmp_path / "mirror"))
    subscriber.advance()
    loaded_by_transformers(subscriber.mirror.materialize(tmp_path / "engine", "bf16"))

    jaxtrain("export", run, tmp_path / "exported", "--format", "f32", "--architecture", NAME, here=EXAMPLES)
    loaded_by_transformers(tmp_path / "exported")
    jaxtrain("import", tmp_path / "exported", tmp_path / "imported", "--architecture", NAME, here=EXAMPLES)
    config = load_config(CONFIG, [f"model={{checkpoint: {tmp_path / 'imported'}}}"])
    assert (config.model.architecture, config.model.moe_intermediate_size) == (NAME, 128)
    trained, imported = (CheckpointReader(d / "checkpoints") for d in (run, tmp_path / "imported"))
    assert trained.step == 4
    names = [name for name in trained.shapes if name.startswith("params/")]
    assert any("mlp/experts/down_proj" in name for name in names)
    for name in names:
        first, second = (reader.restore({name: reader.shapes[name]})[name] for reader in (trained, imported))
        np.testing.assert_array_equal(first, second, err_msg=name)
