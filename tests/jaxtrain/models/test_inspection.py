"""Parameter counts by shape evaluation against the published ones, and bytes on a mesh by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config.model import ModelSection
from jaxtrain.config.presets import PUBLISHED_VOCABULARIES
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from jaxtrain.models.inspection import bytes_on_device, describe
from sharding.mesh import MeshSpec


@pytest.mark.parametrize(
    ("preset", "counts"),
    [
        # arXiv 2508.06471: without embedding and head, 355.23 with the MTP layer, 32 active.
        ("glm4_5_355b", {"body": 351.24, "body_active": 32.08, "body_and_mtp": 355.23}),
        ("glm4_5_air", {"body": 105.61}),
        # arXiv 2505.09388, and the model's card: 30.5 in all, 3.3 active, 29.9 without embedding.
        ("qwen3_30b_a3b", {"total": 30.53, "active": 3.35, "body": 29.91}),
        # The published file's 134,515,008.
        ("smollm2_135m", {"total": 0.134515, "body": 0.106203}),
    ],
)
def test_published_parameter_counts(preset: str, counts: dict[str, float]):
    """In billions, to the digits given."""
    vocabulary = PUBLISHED_VOCABULARIES[preset]
    config = ModelConfig.of(ModelSection.model_validate({"preset": preset}).decoder(vocab_size=vocabulary))
    found = describe(define(config), sequence_length=4096)["parameters"]
    mtp = found["parts"].get("mtp", {"held": 0})["held"]
    for name, billions in counts.items():
        value = found["body"] + mtp if name == "body_and_mtp" else found[name]
        digits = len(str(billions).partition(".")[2])
        assert value / 1e9 == pytest.approx(billions, abs=10**-digits), name


def test_bytes_are_of_one_shard():
    """[8, 6] float32 over 4 x 2 devices is [2, 3]: 24 bytes; a replicated int8 [5] is 5."""
    mesh = MeshSpec(ici={"fsdp": 4, "tensor": 2}).abstract(8)
    tree = {"a": jax.ShapeDtypeStruct((8, 6), jnp.float32), "b": jax.ShapeDtypeStruct((5,), jnp.int8)}
    where = {
        "a": NamedSharding(mesh, PartitionSpec("fsdp", "tensor")),
        "b": NamedSharding(mesh, PartitionSpec()),
    }
    assert bytes_on_device(tree, where) == 29
