"""The files of a mirror, read-only: any process on the host can map the tensors from them.

``run.json``: the run; ``index.json``: name -> dtype, shape, offset; ``tensors.bin``: all canonical bits;
``version.json``: their version and the digest of each tensor. A new version changes these files in place, so
a view is valid only while the owner makes no update: during an engine update.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout_bridge.errors import ExpectedError
from rollout_bridge.quantization import digest
from rollout_bridge.weights.format.canonical import TensorSpec
from rollout_bridge.weights.format.manifest import ManifestRef
from rollout_bridge.weights.format.run import RunInfo

RUN, INDEX, TENSORS, VERSION = "run.json", "index.json", "tensors.bin", "version.json"
_ALIGNMENT = 64


class MirrorError(ExpectedError):
    """A mirror is missing, damaged or in use; names the directory and the remedy."""


@dataclass(frozen=True)
class MirrorState:
    """The version of the bits, and the digest of every tensor."""

    ref: ManifestRef
    step: int
    digests: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return {
            "ref": self.ref.model_dump(),
            "step": self.step,
            "digests": {name: f"{value:016x}" for name, value in self.digests.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MirrorState:
        digests = {name: int(value, 16) for name, value in data["digests"].items()}
        return cls(ManifestRef.model_validate(data["ref"]), data["step"], digests)


@dataclass(frozen=True)
class MirrorView:
    """One version of all tensors of `run`. `offsets` are into `tensors.bin`."""

    directory: Path
    run: RunInfo
    state: MirrorState
    specs: dict[str, TensorSpec]
    offsets: dict[str, int]
    data: np.ndarray

    @classmethod
    def open(cls, directory: str | Path) -> MirrorView:
        """Maps the mirror in `directory` read-only. Raises `MirrorError` if it holds no version."""
        return open_view(Path(directory), writable=False)

    @property
    def version(self) -> int:
        return self.state.ref.version

    def tensor(self, name: str) -> np.ndarray:
        """Canonical bits of `name`, read-only: uint8 (FP8), uint16 (BF16) or uint32 (float32)."""
        array = self.writable(name)
        array.flags.writeable = False
        return array

    def writable(self, name: str) -> np.ndarray:
        """`tensor`, writable if the view was opened writable. For the owner of the mirror only."""
        spec = self.specs[name]
        offset = self.offsets[name]
        return self.data[offset : offset + spec.nbytes].view(spec.bits).reshape(spec.shape)

    def verify(self, names: Iterable[str] | None = None) -> int:
        """Recomputes digests from the bits; returns how many. Raises `MirrorError` naming a wrong tensor."""
        count = 0
        for name in self.specs if names is None else names:
            self.check(name, digest.digest(self.tensor(name)))
            count += 1
        return count

    def check(self, name: str, found: int) -> None:
        """Raises `MirrorError` unless `found` is the digest that tensor `name` should have."""
        expected = self.state.digests[name]
        if found != expected:
            raise MirrorError(
                f"mirror {self.directory}: tensor {name} of version {self.version} has digest "
                f"{found:016x}, expected {expected:016x}: the disk or another program changed it. It "
                "will be fetched again"
            )


def layout(specs: Mapping[str, TensorSpec]) -> tuple[dict[str, int], int]:
    """(offset of each tensor in `tensors.bin`, size of the file): in order, 64-byte aligned."""
    offsets, position = {}, 0
    for name, spec in specs.items():
        offsets[name] = position
        position += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(position, _ALIGNMENT)


def index_json(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Content of `index.json`."""
    offsets, size = layout(specs)
    return {
        "file": TENSORS,
        "size": size,
        "tensors": {
            name: {"dtype": spec.dtype, "shape": list(spec.shape), "offset": offsets[name]}
            for name, spec in specs.items()
        },
    }


def open_view(directory: Path, *, writable: bool) -> MirrorView:
    """Maps a mirror. Raises `MirrorError` if it holds no version or its files do not fit together."""
    try:
        run = RunInfo.from_json(json.loads((directory / RUN).read_bytes()), where=str(directory / RUN))
        state = MirrorState.from_json(json.loads((directory / VERSION).read_bytes()))
        data = np.memmap(directory / TENSORS, mode="r+" if writable else "r", dtype=np.uint8)
    except FileNotFoundError as error:
        raise MirrorError(f"mirror {directory}: holds no version ({error.filename} is missing)") from error
    except (ValueError, KeyError, TypeError) as error:
        raise MirrorError(f"mirror {directory}: damaged: {error}. It will be fetched again") from error
    specs = run.tensors
    offsets, size = layout(specs)
    if data.size != size or state.digests.keys() != specs.keys():
        raise MirrorError(
            f"mirror {directory}: {data.size} bytes and {len(state.digests)} tensors, expected {size} and "
            f"{len(specs)} for run {run.run_id}. It will be fetched again"
        )
    return MirrorView(directory, run, state, specs, offsets, data)
