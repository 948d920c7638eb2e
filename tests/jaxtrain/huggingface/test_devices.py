"""An import uses the devices that share the weights evenly, and never fails for one that does not."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import pytest

from jaxtrain.huggingface.devices import sharing, streaming_mesh


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int


@pytest.mark.parametrize(
    ("size", "processes", "each", "used"),
    [
        (576, 1, 8, 8),
        (576, 1, 7, 6),
        (20, 1, 8, 5),
        (7, 1, 6, 1),
        (12, 2, 4, 6),
        (None, 2, 4, 2),
        (7, 2, 4, 2),
    ],
)
def test_the_most_devices_that_divide_the_same_in_every_process(
    size: int | None, processes: int, each: int, used: int
) -> None:
    devices = [Device(n, n // each) for n in range(processes * each)]
    found = sharing(size, devices)
    assert len(found) == used and found == [d for d in devices if d.id % each < used // processes]


def test_the_mesh_holds_them_on_one_axis() -> None:
    assert len(jax.devices()) == 8
    assert dict(streaming_mesh({"hidden_size": 12}).shape) == {"data": 1, "fsdp": 6, "expert": 1, "tensor": 1}
