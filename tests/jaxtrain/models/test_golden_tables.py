"""Where every array of the real models lies, as tables to read: a change of rules, shapes or optimizer state
shows here as a diff. After a change that is meant, write them anew and read the diff of git:

    python -m tests.jaxtrain.models.test_golden_tables
"""

from __future__ import annotations

import difflib
import math
import warnings
from pathlib import Path

import jax
import pytest

from jaxtrain.config.model import ModelSection
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from jaxtrain.models.sharding_rules import parameter_shardings
from jaxtrain.optim.optimizer import OptimizerConfig, build
from sharding.errors import UnusedAxisWarning
from sharding.inspect import describe
from sharding.mesh import MeshSpec
from sharding.tree import shardings_like

GOLDEN = Path(__file__).with_name("golden")
VOCABULARY = 151552
TABLES = {
    # 64 chips of 95 GB; expert groups of 4 chips, as the torus has them.
    "glm4_5_355b_v5p_4x4x4.txt": ("glm4_5_355b", {"data": 1, "fsdp": 16, "expert": 4, "tensor": 1}),
    "glm4_5_air_8_gpus.txt": ("glm4_5_air", {"data": 1, "fsdp": 8, "expert": 1, "tensor": 1}),
}


def table(preset: str, axes: dict[str, int]) -> str:
    """Parameters and buffers, then the optimizer's state, each with what one device holds."""
    definition = define(
        ModelConfig.of(ModelSection.model_validate({"preset": preset}).decoder(vocab_size=VOCABULARY))
    )
    spec = MeshSpec(axes)
    mesh = spec.abstract(math.prod(axes.values()))
    shardings = parameter_shardings(definition, mesh)
    trained = {path: leaf for path, leaf in definition.shapes.items() if path not in definition.buffers}
    state = jax.eval_shape(build(OptimizerConfig(), trained).init, trained)
    placed = {path: shardings[path] for path in trained}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusedAxisWarning)
        parameters = describe(definition.shapes, shardings)
        optimizer = describe(state, shardings_like(state, trained, placed, mesh))
    title = f"{preset}, vocabulary {VOCABULARY}, mesh {spec}"
    return f"{title}\n\nparameters and buffers\n{parameters}\n\noptimizer state\n{optimizer}\n"


@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_the_one_on_file(name):
    expected, found = (GOLDEN / name).read_text(encoding="utf-8"), table(*TABLES[name])
    changes = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), "on file", "found", lineterm="", n=0
    )
    assert expected == found, "\n" + "\n".join(changes) + f"\n{__doc__}"


if __name__ == "__main__":
    for name, arguments in TABLES.items():
        (GOLDEN / name).write_text(table(*arguments), encoding="utf-8")
