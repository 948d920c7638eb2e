"""How a decoder's logical axes map to the mesh axes data, fsdp, expert, context and tensor."""

from __future__ import annotations

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxtrain.models.definition import Definition
from jaxtrain.models.placement import activation_spec
from sharding.rules import ShardingRules

RULES = ShardingRules(
    {
        "layers": None,  # scanned
        "embed": ("fsdp", "expert"),
        "expert_embed": "fsdp",
        "embed_norm": None,  # vectors: not worth a gather
        "head_dim": None,
        "heads": "tensor",
        "kv_heads": "tensor",
        "mlp": "tensor",
        "experts": "expert",
        "expert_mlp": "tensor",
        "router": None,  # float32 scores of all experts are needed everywhere
        "vocab": "tensor",
    }
)


def parameter_shardings(definition: Definition, mesh: Mesh | AbstractMesh) -> dict[str, NamedSharding]:
    """Path -> sharding. Raises `ShardingError` naming every parameter that does not divide."""
    return RULES.restricted_to(mesh).shardings(definition.axes, definition.shapes, mesh)


def row_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Sharding of a microbatch [row, sequence]."""
    return NamedSharding(mesh, activation_spec(mesh))
