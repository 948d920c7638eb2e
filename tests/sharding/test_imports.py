"""The package stands alone: it imports and works where none of our other packages, nor flax, exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        blocked = {"jaxtrain", "rollout_bridge", "flax", "optax", "orbax", "grain", "tensorstore"}
        if name.split(".")[0] in blocked:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import importlib, pkgutil
import sharding
modules = [m.name for m in pkgutil.iter_modules(sharding.__path__)]
for module in modules:
    importlib.import_module(f"sharding.{module}")
import numpy as np
from sharding import MeshSpec, ShardingRules, describe, shard
mesh = MeshSpec({"data": -1}).build()
tree = {"w": np.ones((8, 2), np.float32)}
shardings = ShardingRules({"embed": "data"}).shardings({"w": ("embed", None)}, tree, mesh)
print(sorted(modules), describe(shard(tree, shardings)).bytes_per_device)
"""


def test_the_package_works_with_jax_and_numpy_alone():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    modules = [
        "cluster",
        "collectives",
        "errors",
        "hlo",
        "inspect",
        "leaves",
        "mesh",
        "processes",
        "rules",
        "tree",
    ]
    assert done.stdout.strip() == f"{modules} 8"


def test_the_package_gives_the_public_names_of_its_modules_and_starts_no_device():
    """jax.distributed can only start before the first device does; jax says whether one has."""
    program = """
import sharding
from jax._src import xla_bridge
print(all(hasattr(sharding, name) for name in sharding.__all__), xla_bridge.backends_are_initialized())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "True False", done.stderr
