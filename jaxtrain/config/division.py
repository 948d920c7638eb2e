"""Whether microbatches and model divide among the devices of a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxtrain.config.model import MeshSection, ModelSection
from jaxtrain.config.optimization import BatchSection, StageSection

ROW_AXES = ("data", "fsdp", "expert")  # mesh axes that split the rows of a batch


def known_sizes(mesh: MeshSection) -> dict[str, int]:
    """Size of each axis, both levels multiplied; an axis of -1 counts as 1, which divides everything."""
    ici, dcn = mesh.ici.model_dump(), mesh.dcn.model_dump()
    return {name: max(ici[name], 1) * max(dcn[name], 1) for name in ici}


def undivided(
    model: ModelSection, microbatches: Mapping[str, BatchSection | StageSection], sizes: Mapping[str, int]
) -> list[tuple[str, str]]:
    """(field, problem with its remedy) of everything that does not divide.

    microbatches: by the field of the config that gives them. sizes: of the mesh's axes.
    """
    found = []
    row_parts = math.prod(sizes.get(axis, 1) for axis in ROW_AXES)
    context = sizes.get("context", 1)
    for field, microbatch in microbatches.items():
        if microbatch.rows % row_parts:
            axes = " * ".join(f"{axis} {sizes.get(axis, 1)}" for axis in ROW_AXES)
            found.append(
                (
                    f"{field}.rows",
                    f"{microbatch.rows} is not a multiple of {row_parts}, the mesh's {axes}; make it one, or "
                    "move devices to mesh.ici.tensor or mesh.ici.context",
                )
            )
        if context > 1 and microbatch.sequence_length % (2 * context):
            found.append(
                (
                    f"{field}.sequence_length",
                    f"{microbatch.sequence_length} is not a multiple of {2 * context}: each of the mesh's "
                    f"{context} context parts takes two equal pieces; make it one, or lower mesh.ici.context",
                )
            )
    experts, expert = model.n_routed_experts, sizes.get("expert", 1)
    if experts is not None and experts % expert:
        found.append(
            ("mesh.ici.expert", f"{expert} groups do not divide model.n_routed_experts {experts}; lower it")
        )
    tensor = sizes.get("tensor", 1)
    if model.num_key_value_heads % tensor:
        found.append(
            (
                "mesh.ici.tensor",
                f"{tensor} parts do not divide model.num_key_value_heads {model.num_key_value_heads}; "
                "lower it",
            )
        )
    return found
