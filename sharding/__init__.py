"""Sharding of JAX arrays: meshes, rules, inspection, collectives, processes. Needs only jax and numpy.

Importing it does not start a device, so `processes.initialize` can be called later.
"""

from sharding import processes
from sharding.collectives import Collective, Total, collectives, report, totals
from sharding.errors import ProcessesError, ShardingError, UnusedAxisWarning
from sharding.inspect import Description, assert_sharded, assert_waste_below, describe
from sharding.mesh import MeshSpec, topology_devices
from sharding.rules import ShardingRules, logical_axes_of
from sharding.tree import gather, replicate, reshard, shard, shardings_like, to_global, to_local

__all__ = [
    "Collective",
    "Description",
    "MeshSpec",
    "ProcessesError",
    "ShardingError",
    "ShardingRules",
    "Total",
    "UnusedAxisWarning",
    "assert_sharded",
    "assert_waste_below",
    "collectives",
    "describe",
    "gather",
    "logical_axes_of",
    "processes",
    "replicate",
    "report",
    "reshard",
    "shard",
    "shardings_like",
    "to_global",
    "to_local",
    "topology_devices",
    "totals",
]
