"""Some arrays of a finished checkpoint, for programs that only read: exports, and runs that start from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxtrain.training.checkpoint import ARRAYS, JSON, CheckpointError
from jaxtrain.training.integrity import digests


class CheckpointReader:
    """The checkpoints of one directory, which may belong to a run that is training: nothing is written.

    Arrays are restored by path, as many as are asked for, on any mesh.
    """

    def __init__(self, directory: str | os.PathLike[str], step: int | None = None) -> None:
        """Opens `step`, or the newest. Raises `CheckpointError` if there is no such finished one."""
        self.directory = Path(directory).absolute()
        steps = sorted(int(p.name) for p in self.directory.glob("[0-9]*") if p.name.isdecimal())
        if not steps or (step is not None and step not in steps):
            wanted = "a finished checkpoint" if step is None else f"step {step}"
            raise CheckpointError(f"{self.directory}: found steps {steps}, expected {wanted}")
        self.step = steps[-1] if step is None else step
        self._where: Any = self.directory / str(self.step)  # Orbax's annotations want etils paths
        try:
            item = ocp.JsonCheckpointHandler().restore(self._where / JSON)
            self._digests: dict[str, int] = item["digests"]
            self.data: dict[str, Any] = item["data"]
            stored = ocp.StandardCheckpointHandler().metadata(self._where / ARRAYS).tree
        except Exception as error:  # Orbax and TensorStore raise many kinds for damaged files
            raise self._unreadable(f"its metadata: {error}") from error
        self.shapes = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in stored.items()}

    def restore(self, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Arrays by path, with the shapes, dtypes and shardings of `like`. All processes of its mesh call it.

        Raises `CheckpointError` naming paths that are not there or of another shape, files that cannot be
        read, and arrays that are not bit for bit what was saved.
        """
        problems = [
            f"{path}: found {self.shapes.get(path, 'nothing')}, expected {leaf.dtype}{list(leaf.shape)}"
            for path, leaf in sorted(like.items())
            if path not in self.shapes
            or (self.shapes[path].shape, self.shapes[path].dtype) != (leaf.shape, np.dtype(leaf.dtype))
        ]
        if problems:
            raise CheckpointError(
                f"{self._where}: {len(problems)} leaves are not those of this model; use the configuration "
                "it was saved with\n  " + "\n  ".join(problems[:10])
            )
        try:
            found = ocp.PyTreeCheckpointHandler().restore(
                self._where / ARRAYS,
                args=ocp.args.PyTreeRestore(
                    item=dict(like),
                    restore_args=ocp.checkpoint_utils.construct_restore_args(dict(like)),
                    partial_restore=True,
                ),
            )
        except Exception as error:  # as above
            raise self._unreadable(str(error)) from error
        calculated = digests(found)
        if damaged := [path for path in found if calculated[path] != self._digests[path]]:
            raise self._unreadable(f"{damaged} are not what was saved: their digests differ")
        return found

    def _unreadable(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self._where}: could not be read: {reason}\n  Files are missing or damaged: use another step, "
            "or make the checkpoint again"
        )
