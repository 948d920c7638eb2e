"""Checkpoints: arrays and one JSON item a step, written in the background, whole or not at all."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxtrain.training.integrity import digests
from jaxtrain.training.steps import rename_later
from rollout_bridge.errors import ExpectedError
from sharding import processes

log = logging.getLogger(__name__)

# Items of a checkpoint; the JSON one holds the caller's data and the arrays' digests.
ARRAYS, JSON = "arrays", "json"


class CheckpointError(ExpectedError):
    """A checkpoint is missing, unreadable, or of another state than expected."""


class UnreadableCheckpoint(CheckpointError):
    """Files of a checkpoint are missing or damaged."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """The result of `Checkpointer.restore`.

    Attributes:
      step: of the checkpoint.
      arrays: a tree of the structure, dtypes and shardings that were asked for.
      data: the JSON item.
    """

    step: int
    arrays: Any
    data: dict[str, Any]


class Checkpointer:
    """Orbax checkpoints of one run, one subdirectory a step.

    A step's directory is written under a temporary name and renamed when every array and the data are in it,
    so a process killed at any moment leaves the finished ones as they were. Arrays are stored by the path of
    the leaf, not by the Python structure of the tree, and any mesh can restore them. All processes call every
    method, with the same arguments.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int, save_interval_steps: int) -> None:
        """Opens the directory, creating it.

        Args:
          directory: a local path or a gs:// or s3:// URL.
          keep: newest finished checkpoints that are kept.
          save_interval_steps: `save` takes only multiples of it, unless forced.
        """
        for name, value in (("keep", keep), ("save_interval_steps", save_interval_steps)):
            if value < 1:
                raise ValueError(f"checkpoint.{name}: found {value}, expected at least 1")
        self.directory = os.fspath(directory)
        if "://" not in self.directory:
            self.directory = str(Path(self.directory).absolute())
        self._interval = save_interval_steps
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, enable_async_checkpointing=True, cleanup_tmp_directories=True
            ),
            item_handlers={ARRAYS: ocp.StandardCheckpointHandler(), JSON: ocp.JsonCheckpointHandler()},
        )

    def save(self, step: int, arrays: Any, data: Mapping[str, Any], *, force: bool = False) -> bool:
        """Starts a checkpoint and returns once the arrays are copied to the host: they may be donated then.

        It waits for the previous save, if that is still being written, and raises its exception.

        Args:
          step: optimizer steps done.
          arrays: a tree of arrays.
          data: what JSON holds, the same on every process.
          force: take a step that is no multiple of the interval.

        Returns:
          Whether a checkpoint was started: False between multiples of the interval, and for a step that is
          already saved.

        Raises:
          CheckpointError: a later step is there already, or leaves that cannot be stored.
        """
        if not force and step % self._interval:
            return False
        self._manager.wait_until_finished()
        steps = self.all_steps()
        if step in steps:
            return False
        if steps and step < steps[-1]:
            raise CheckpointError(
                f"{self.directory}: cannot save step {step}, step {steps[-1]} is there already; restore that "
                "one, or delete the later steps' directories if they are to be trained again"
            )
        leaves = _by_path(arrays)
        item = {"data": dict(data), "digests": digests(leaves)}
        items = ocp.args.Composite(**{ARRAYS: ocp.args.StandardSave(leaves), JSON: ocp.args.JsonSave(item)})
        return bool(self._manager.save(step, args=items, force=True))

    def restore(self, step: int | None, like: Any) -> Restored:
        """Reads a checkpoint.

        Args:
          step: which one; None for the newest.
          like: a tree of arrays or ShapeDtypeStructs with the paths, shapes, dtypes and shardings to restore
            to. jax leaves without a sharding come on the first local device, numpy leaves as numpy arrays.

        Raises:
          CheckpointError: no such step, leaves that differ from `like` in path, shape or dtype, files that
            cannot be read, or arrays that are not bit for bit what was saved. The message names the
            checkpoint, the leaves and what to do.
        """
        step = self._existing(step)
        where = f"{self.directory}/{step}"
        wanted = _by_path(like)
        self._check(where, step, wanted)
        targets = {path: _target(leaf) for path, leaf in wanted.items()}
        items = ocp.args.Composite(
            **{ARRAYS: ocp.args.StandardRestore(targets), JSON: ocp.args.JsonRestore()}
        )
        try:
            restored = self._manager.restore(step, args=items)
        except Exception as error:  # Orbax and TensorStore raise many kinds for damaged files
            raise UnreadableCheckpoint(self._unreadable(where, step, str(error))) from error
        leaves = {path: restored[ARRAYS][path] for path in wanted}
        saved, found = restored[JSON]["digests"], digests(leaves)
        if damaged := [path for path in wanted if found[path] != saved[path]]:
            raise CheckpointError(
                self._unreadable(where, step, f"{damaged} are not what was saved: their digests differ")
            )
        tree = jax.tree.unflatten(jax.tree.structure(like), list(leaves.values()))
        return Restored(step, tree, restored[JSON]["data"])

    def restore_newest(self, like: Any) -> Restored:
        """As `restore` of the newest checkpoint that can be read; later ones are renamed.

        Raises:
          CheckpointError: as `restore`; where none can be read, for the newest.
        """
        unreadable: list[UnreadableCheckpoint] = []
        for step in reversed(self.all_steps()):
            try:
                restored = self.restore(step, like)
            except UnreadableCheckpoint as error:
                unreadable.append(error)
                continue
            for error in unreadable:
                log.error("%s", error)
            if unreadable:
                if processes.process_index() == 0:
                    rename_later(self.directory, after=step)
                processes.barrier(f"checkpoints after step {step} are renamed")
                self._manager.reload()
            return restored
        raise unreadable[0] if unreadable else CheckpointError(f"{self.directory}: found no checkpoint")

    def latest(self) -> int | None:
        """Returns the newest finished step, or None."""
        return self._manager.latest_step()

    def all_steps(self) -> list[int]:
        """Returns finished steps, ascending."""
        return sorted(self._manager.all_steps())

    def wait(self) -> None:
        """Returns when the save in progress is durable; raises its exception if it failed."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the save in progress and releases the threads."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _existing(self, step: int | None) -> int:
        steps = self.all_steps()
        if not steps:
            raise CheckpointError(
                f"{self.directory}: found no finished checkpoint; check the directory, or start without "
                "restoring"
            )
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.directory}: found no step {step}, expected one of {steps}")
        return steps[-1] if step is None else step

    def _check(self, where: str, step: int, wanted: Mapping[str, Any]) -> None:
        try:
            stored = self._manager.item_metadata(step)[ARRAYS]
            found = {path: (tuple(leaf.shape), np.dtype(leaf.dtype)) for path, leaf in stored.tree.items()}
        except Exception as error:  # as in restore
            raise UnreadableCheckpoint(self._unreadable(where, step, f"its metadata: {error}")) from error
        expected = {path: (tuple(leaf.shape), np.dtype(leaf.dtype)) for path, leaf in wanted.items()}
        problems = [
            f"{path}: found {_describe(found.get(path))}, expected {_describe(expected.get(path))}"
            for path in sorted(found.keys() | expected.keys())
            if found.get(path) != expected.get(path)
        ]
        if problems:
            listed = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
            raise CheckpointError(
                f"{where}: {len(problems)} leaves are not those of this state; use the model and optimizer "
                "settings the checkpoint was saved with, or another directory\n  " + "\n  ".join(listed)
            )

    def _unreadable(self, where: str, step: int, reason: str) -> str:
        others = [other for other in self.all_steps() if other != step]
        remedy = f"restore one of {others}" if others else "no other step is there to restore"
        return (
            f"{where}: could not be read: {reason}\n"
            f"  Files are missing or damaged: {remedy}, and move {where} away"
        )


def _by_path(tree: Any) -> dict[str, Any]:
    """Returns leaves by path, keys joined with "/"; the order is that of jax.tree.leaves."""
    leaves: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise CheckpointError(f"{path}: found {type(leaf).__name__}, expected an array; put it into data")
        if path in leaves:
            raise CheckpointError(f"{path}: two leaves have this path; rename one")
        leaves[path] = leaf
    return leaves


def _target(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _describe(leaf: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "nothing" if leaf is None else f"{leaf[1]}{list(leaf[0])}"
