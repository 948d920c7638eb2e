"""Meshes: ordered axis sizes inside a slice (ICI) and between slices (DCN), built into a jax Mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AbstractMesh, AxisType, Mesh

from sharding.errors import ShardingError

Axes = Mapping[str, int] | tuple[tuple[str, int], ...]

REST = -1


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Axis names and sizes, outermost first; independent of any device until `build`.

    Attributes:
      ici: axes over devices joined by fast links (one TPU slice, one NVLink domain), as a mapping or pairs.
        Stored as pairs, so that the order of axes takes part in equality.
      dcn: axes over groups of devices joined by the data-centre network. A name that is also in `ici`
        multiplies its size, the DCN part outermost; other DCN axes come before all ICI axes.
      axis_type: how jax treats every axis. Auto lets the compiler place collectives; Explicit puts
        shardings into types. Always passed on, because the default of jax is not the same in all versions.
      split_physical_axes: let a logical axis take part of a physical torus axis. Slower collectives, so off.

    One size may be -1: all devices that the other axes leave.
    """

    ici: Axes
    dcn: Axes = ()
    axis_type: AxisType = AxisType.Auto
    split_physical_axes: bool = False

    def __post_init__(self) -> None:
        for field in ("ici", "dcn"):
            axes = getattr(self, field)
            pairs = tuple(axes.items()) if isinstance(axes, Mapping) else tuple((n, s) for n, s in axes)
            object.__setattr__(self, field, pairs)
            names = [name for name, _ in pairs]
            if len(set(names)) != len(names):
                raise ShardingError(f"MeshSpec.{field}: axis named twice in {names}")
            for name, size in pairs:
                if size != REST and (not isinstance(size, int) or size < 1):
                    raise ShardingError(
                        f"MeshSpec.{field}[{name!r}]: size {size!r} is neither a positive integer nor -1"
                        " (the rest)"
                    )
        if not self._all:
            raise ShardingError("MeshSpec: no axes; give at least one, for instance {'data': -1}")
        if sum(size == REST for _, size in self._all) > 1:
            raise ShardingError(f"MeshSpec: more than one axis is -1 in ici={self.ici} dcn={self.dcn}")

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names in mesh order: DCN-only axes, then ICI axes."""
        ici = tuple(name for name, _ in _pairs(self.ici))
        return tuple(name for name, _ in _pairs(self.dcn) if name not in ici) + ici

    def resolve(self, device_count: int) -> MeshSpec:
        """The same spec with -1 replaced, for `device_count` devices; ShardingError if sizes do not fit."""
        given = math.prod(size for _, size in self._all if size != REST)
        has_rest = any(size == REST for _, size in self._all)
        if device_count % given or (not has_rest and given != device_count):
            relation = "do not divide" if has_rest else "are not"
            raise ShardingError(
                f"MeshSpec {self}: the given sizes multiply to {given}, which {relation} the"
                f" {device_count} devices; change a size,"
                " make one axis -1, or pass exactly the devices to use to build()"
            )
        rest = device_count // given

        def fill(axes: Axes) -> tuple[tuple[str, int], ...]:
            return tuple((name, rest if size == REST else size) for name, size in _pairs(axes))

        return dataclasses.replace(self, ici=fill(self.ici), dcn=fill(self.dcn))

    def build(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Mesh over `devices` (all of them by default), laid out for the interconnect.

        Devices are grouped for the DCN axes by slice, else by process; the simulated devices of one CPU
        process are cut into equal runs. Raises ShardingError when sizes or groups do not fit.
        """
        devices = list(jax.devices() if devices is None else devices)
        spec = self.resolve(len(devices))
        ici, dcn = dict(_pairs(spec.ici)), dict(_pairs(spec.dcn))
        names = self.axis_names
        ici_shape = tuple(ici.get(name, 1) for name in names)
        dcn_shape = tuple(dcn.get(name, 1) for name in names)
        groups = _groups(devices, math.prod(dcn_shape), spec)
        blocks = [_layout(group, ici_shape, spec) for group in groups]
        # [*dcn, *ici] -> [dcn0, ici0, dcn1, ici1, ...] -> each pair merged, the DCN part outermost.
        stacked = np.stack(blocks).reshape(*dcn_shape, *ici_shape)
        rank = len(names)
        order = [position for axis in range(rank) for position in (axis, rank + axis)]
        shape = tuple(a * b for a, b in zip(dcn_shape, ici_shape, strict=True))
        array = stacked.transpose(order).reshape(shape)
        return Mesh(array, names, axis_types=(self.axis_type,) * rank)

    def abstract(self, device_count: int) -> AbstractMesh:
        """The mesh's axes without devices: enough for rules and `describe`, on any machine.

        Only `topology` checks that the shape fits an interconnect.
        """
        spec = self.resolve(device_count)
        ici, dcn = dict(_pairs(spec.ici)), dict(_pairs(spec.dcn))
        sizes = tuple(ici.get(name, 1) * dcn.get(name, 1) for name in self.axis_names)
        return AbstractMesh(sizes, self.axis_names, axis_types=(self.axis_type,) * len(sizes))

    def topology(self, name: str, *, num_slices: int = 1) -> Mesh:
        """Mesh over the compile-only devices of `topology_devices(name)`: compile for absent hardware."""
        return self.build(topology_devices(name, num_slices=num_slices))

    def __str__(self) -> str:
        def text(axes: Axes) -> str:
            return "{" + ", ".join(f"{name}: {size}" for name, size in _pairs(axes)) + "}"

        return f"ici={text(self.ici)}" + (f" dcn={text(self.dcn)}" if self.dcn else "")

    @property
    def _all(self) -> tuple[tuple[str, int], ...]:
        return _pairs(self.ici) + _pairs(self.dcn)


def topology_devices(name: str, *, num_slices: int = 1) -> tuple[Any, ...]:
    """Compile-only TPU devices of a topology such as `v5p:4x4x4`, `v5e:16x16`, `v6e:8x8`, `tpu7x:4x4x4`.

    Programs can be lowered and compiled for them, not run. Needs the libtpu package (`pip install
    'jax[tpu]'`), no TPU. Raises ShardingError naming the remedy.
    """
    options = {} if num_slices == 1 else {"num_slices": num_slices}
    try:
        return tuple(topologies.get_topology_desc(topology_name=name, platform="tpu", **options).devices)
    except RuntimeError as error:
        remedy = (
            "install the TPU compiler with: pip install 'jax[tpu]'"
            if "not installed" in str(error)
            else "name a chip and its topology, for instance v5p:4x4x4, v5e:16x16, v6e:8x8 or tpu7x:4x4x4"
        )
        raise ShardingError(f"topology {name!r} (num_slices={num_slices}): {error}; {remedy}") from error


def _pairs(axes: Axes) -> tuple[tuple[str, int], ...]:
    return tuple(axes.items()) if isinstance(axes, Mapping) else axes


def _groups(devices: list[Any], count: int, spec: MeshSpec) -> list[list[Any]]:
    """`count` equal groups of devices, each joined by fast links."""
    if count == 1:
        return [devices]
    seen = []
    for attribute in ("slice_index", "process_index"):
        keys = [getattr(device, attribute, None) for device in devices]
        if None in keys:
            continue
        distinct = sorted({int(key) for key in keys if key is not None})
        groups = [[d for d, k in zip(devices, keys, strict=True) if k == key] for key in distinct]
        sizes = {len(group) for group in groups}
        seen.append(f"{len(groups)} by {attribute}")
        if len(groups) > 1 and len(groups) % count == 0 and len(sizes) == 1:
            merge = len(groups) // count
            return [sum(groups[i * merge : (i + 1) * merge], []) for i in range(count)]
    one_process = len({device.process_index for device in devices}) == 1
    if one_process and devices[0].platform == "cpu":
        size = len(devices) // count
        return [devices[i * size : (i + 1) * size] for i in range(count)]
    raise ShardingError(
        f"MeshSpec {spec}: the DCN axes ask for {count} groups of devices, found"
        f" {' and '.join(seen) or 'none'}; make"
        " the product of the dcn sizes equal the number of slices (or hosts)"
    )


def _layout(devices: list[Any], shape: tuple[int, ...], spec: MeshSpec) -> np.ndarray:
    try:
        return mesh_utils.create_device_mesh(
            shape, devices, allow_split_physical_axes=spec.split_physical_axes
        )
    except NotImplementedError as error:
        raise ShardingError(
            f"MeshSpec {spec}: shape {shape} cannot be laid out on {len(devices)}"
            f" {devices[0].device_kind} devices"
            f" ({error}); choose axes that are products of physical ones, or set split_physical_axes=True"
        ) from error
