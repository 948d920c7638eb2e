"""What each of the two processes of test_processes.py runs: `python processes_program.py COORDINATOR ID`.

Prints one JSON line of what it observed.
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import processes
from sharding.errors import ProcessesError
from sharding.mesh import MeshSpec
from sharding.tree import gather, reshard, shard, to_global, to_local


def main(coordinator: str, process_id: int) -> None:
    seen: dict = {}
    processes.initialize(coordinator, 2, process_id, timeout_seconds=300)
    seen["index"], seen["count"] = processes.process_index(), processes.process_count()

    # The same name again is another broadcast, and the source need not be process 0.
    mine = {"from": process_id, "pair": (1, 2)}
    seen["broadcasts"] = [
        processes.broadcast_json(mine, name="settings", timeout=300),
        processes.broadcast_json([process_id], name="settings", timeout=300),
        processes.broadcast_json(mine, name="other", source=1, timeout=300),
    ]
    processes.barrier("everybody is here", 300)
    seen["answers"] = [
        processes.any_of(flag, name="stop", timeout=300) for flag in (False, process_id == 1, False)
    ]

    # A flag of one process is seen by the other whenever it looks; neither waits.
    seen["flags"] = [processes.flag_raised("asked")]
    processes.barrier("all have looked", 300)
    if process_id == 1:
        processes.raise_flag("asked")
        processes.raise_flag("asked")  # again is the same
    processes.barrier("it is raised", 300)
    seen["flags"] += [processes.flag_raised("asked"), processes.flag_raised("other")]

    # 2 processes x 4 devices: one all-reduce across both.
    mesh = MeshSpec({"data": -1}, dcn={"replica": 2}).build()
    seen["processes of the rows"] = [
        {d.process_index for d in row} == {i} for i, row in enumerate(mesh.devices)
    ]
    rows = NamedSharding(mesh, P(("replica", "data")))
    local = np.arange(8, dtype=np.float32).reshape(4, 2) + 100 * process_id
    array = to_global(local, rows)
    seen["sum"] = float(jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))(array))
    seen["local"] = to_local(array).tolist() == local.tolist()
    whole = np.arange(8, dtype=np.int32)
    own_rows = to_local(shard(whole, NamedSharding(mesh, P("replica"))))
    seen["own rows of a whole array"] = own_rows.tolist() == whole[4 * process_id :][:4].tolist()
    seen["gathered"] = gather(reshard(array, NamedSharding(mesh, P(None, "replica")))).tolist()

    # One process alone at a barrier learns whom it missed; then both meet, which lets the late one exit too.
    if process_id == 0:
        try:
            processes.barrier("checkpoint step 7", 0.5)
        except ProcessesError as error:
            seen["barrier error"] = str(error)
    processes.barrier("after the missed one", 300)
    try:
        if process_id == 1:
            processes.broadcast_json(None, name="plan 3", timeout=0.5)
    except ProcessesError as error:
        seen["broadcast error"] = str(error)
    processes.barrier("done", 300)
    processes.shutdown()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
