"""Sum over every chip of a pod: each host runs this with rows of its own. Commands: docs/sharding.md."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sharding import MeshSpec, describe, processes, to_global

processes.initialize()  # before anything touches a device
mesh = MeshSpec({"fsdp": -1}).build()
rows = np.full((jax.local_device_count(), 4), processes.process_index() + 1, np.float32)
batch = to_global(rows, NamedSharding(mesh, PartitionSpec("fsdp")))
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(batch)
if processes.process_index() == 0:
    print(describe({"batch": batch}))
print(f"process {processes.process_index()} of {processes.process_count()}: sum {float(total):g}", flush=True)
processes.barrier("the end", timeout=60)
processes.shutdown()
