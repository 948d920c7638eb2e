"""One process of test_processes.py: `processes_program.py COORDINATOR ID STORE FIRST LAST REFUSED`.

Takes the run over together, checks the head if there is one, and publishes the steps FIRST..LAST of the tiny
model, sharded over 2 processes x 4 devices. The store refuses what process 1 writes of step REFUSED (0: of
none). Prints one JSON line of what it observed.
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rollout_bridge.store import Store, StoreError
from rollout_bridge.weights.format.manifest import Latest
from sharding import processes
from tests.rollout_bridge.weights import tiny

PATIENCE = 300  # seconds for the other process: on a busy machine one starts long after the other

# Experts over the processes; widths over both, some of them across 128-blocks.
SPECS = {
    "moe/mlp/experts/gate_proj": PartitionSpec(None, "process", None, "device"),
    "moe/mlp/experts/up_proj": PartitionSpec(None, None, "device", "process"),
    "dense/mlp/gate_proj/kernel": PartitionSpec(None, None, ("process", "device")),
    "dense/mlp/up_proj/kernel": PartitionSpec(None, "process", "device"),
    "dense/mlp/down_proj/kernel": PartitionSpec(None, "device"),
    "embedding": PartitionSpec("device", "process"),
    "moe/attention/q_proj/kernel": PartitionSpec(None, "process"),
}


class Refusing(Store):
    """Refuses writes of blobs from a moment on."""

    refuses = False

    def put(self, key: str, data: bytes) -> None:
        if self.refuses and key.endswith(".blob"):
            raise StoreError(f"store {self.url}: write of {key!r} failed: no space left")
        super().put(key, data)


def tree_of(step: int) -> tiny.Params:
    tree = tiny.params()
    for number in range(1, step + 1):
        tree = tiny.step(tree, number)
    return tree


def spread(tree: tiny.Params, mesh: Mesh) -> dict[str, jax.Array]:
    """Every process gives its own part, as after a training step."""
    return {
        path: jax.make_array_from_callback(
            array.shape,
            NamedSharding(mesh, SPECS.get(path, PartitionSpec())),
            lambda index, array=array: array[index],
        )
        for path, array in tree.items()
    }


def main(coordinator: str, process: int, url: str, first: int, last: int, refused: int) -> None:
    seen: dict = {"kinds": [], "blobs": 0, "reproduced": None, "error": None}
    processes.initialize(coordinator, 2, process, timeout_seconds=PATIENCE)
    store = Refusing.open(url)
    timeout = 20.0 if refused else float(PATIENCE)
    publisher = tiny.publisher(store, full_every=2, process=process, processes=2, timeout=timeout)
    head = publisher.take_over().model_dump(mode="json") if process == 0 else None
    head = Latest.model_validate(processes.broadcast_json(head, name="head", timeout=PATIENCE))
    if process != 0:
        publisher.join(head)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("process", "device"))
    if head.version:
        seen["reproduced"] = publisher.verify_head(spread(tree_of(head.step), mesh))
    for step in range(first, last + 1):
        store.refuses = step == refused and process == 1
        params = spread(tree_of(step), mesh)
        processes.barrier(f"step {step}", PATIENCE)
        try:
            manifest = publisher.publish(params, step=step).result(PATIENCE)
        except StoreError as error:
            seen["error"] = str(error)
            break
        seen["kinds"].append(manifest.kind + ("+change" if manifest.follows else ""))
        pieces = [piece for entry in manifest.tensors.values() for piece in (*entry.blobs, *entry.change)]
        seen["blobs"] += sum(f"{process:05d}-" in piece.key for piece in pieces)
    print("\n" + json.dumps(seen), flush=True)
    if not refused:
        publisher.close()
    processes.barrier("done", PATIENCE)
    processes.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *(int(number) for number in sys.argv[4:7]))
