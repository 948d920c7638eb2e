"""The devices that an import or an export streams through."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import jax
from jax.sharding import Mesh

from sharding.mesh import MeshSpec

log = logging.getLogger(__name__)


def streaming_mesh(hf_config: Mapping[str, Any]) -> Mesh:
    """The most devices that divide hidden_size, the same number in every process, all on `fsdp`.

    hf_config: a config.json, not checked yet: without a usable hidden_size one device of each process.
    """
    devices = sharing(hf_config.get("hidden_size"), jax.devices())
    if len(devices) < len(jax.devices()):
        log.info("%d of %d devices share the weights evenly", len(devices), len(jax.devices()))
    return MeshSpec(ici={"data": 1, "fsdp": -1, "expert": 1, "tensor": 1}).build(devices)


def sharing(size: Any, devices: Sequence[Any]) -> list[Any]:
    """The most of `devices` that divide `size`, equally many of each process; one of each if none do."""
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    own = [list(group) for _, group in groupby(ordered, key=lambda device: device.process_index)]
    known = isinstance(size, int) and size > 0
    counts = [n for n in range(1, min(map(len, own)) + 1) if known and size % (n * len(own)) == 0]
    most = max(counts, default=1)
    return [device for group in own for device in group[:most]]
