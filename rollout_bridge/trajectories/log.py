"""The trajectory log: `trajectories/<writer>/<sequence>.parquet`, written once, read incrementally, checked.

A writer id belongs to one process start, so each key has one writer and a conditional create never
overwrites. Evaluations go through the same codec under `evaluations/<id>/`, and no reader of the log looks
there.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollout_bridge.control import CONTRACT_KEY, read
from rollout_bridge.engines.protocol import FinishReason
from rollout_bridge.store import Store
from rollout_bridge.trajectories import segment
from rollout_bridge.trajectories.contract import Contract
from rollout_bridge.trajectories.schema import Status, Trajectory, group_id

logger = logging.getLogger(__name__)

PREFIX = "trajectories/"
_KEY = re.compile(r"trajectories/[A-Za-z0-9._-]+/\d{8}\.parquet")
_WRITER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


def segment_key(writer: str, sequence: int) -> str:
    return f"{PREFIX}{writer}/{sequence:08d}.parquet"


@dataclass(frozen=True, kw_only=True)
class TrajectoryRef:
    """What selection needs to know of one trajectory, and where its row is.

    tokens: all of them, prompt included; version_counts: (version, trainable tokens of it), ascending.
    routed_experts: (MoE layers, k) of what the engine sent, None if nothing. rewards: components by name.
    truncated: by a limit of tokens.
    """

    segment: str
    row: int
    trajectory_id: str
    group_id: str
    prompt_index: int
    member: int
    tokens: int
    version_counts: tuple[tuple[int, int], ...]
    reward: float
    status: Status
    created_at: float
    routed_experts: tuple[int, ...] | None = None
    rewards: tuple[tuple[str, float], ...] = ()
    truncated: bool = False

    @property
    def trainable_tokens(self) -> int:
        return sum(count for _, count in self.version_counts)

    @property
    def age_key(self) -> tuple[float | int | str, ...]:
        """Oldest policy first, then oldest in time; unique."""
        oldest = self.version_counts[0][0] if self.version_counts else -1
        return (oldest, self.created_at, self.prompt_index, self.member, self.segment, self.row)


def reference(trajectory: Trajectory, *, segment: str, row: int) -> TrajectoryRef:
    versions, counts = np.unique(trajectory.versions[trajectory.trainable], return_counts=True)
    return TrajectoryRef(
        segment=segment,
        row=row,
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        prompt_index=trajectory.prompt_index,
        member=trajectory.member,
        tokens=len(trajectory.token_ids),
        version_counts=tuple(zip(versions.tolist(), counts.tolist(), strict=True)),
        reward=trajectory.reward,
        status=trajectory.status,
        created_at=trajectory.created_at,
        routed_experts=None
        if trajectory.routed_experts is None
        else tuple(trajectory.routed_experts.shape[1:]),
        rewards=tuple(sorted(trajectory.rewards.items())),
        truncated=trajectory.finish_reason == FinishReason.LENGTH,
    )


class SegmentWriter:
    """Appends immutable segments under one writer id.

    A second writer with the same id continues its sequence and overwrites nothing. contract: goes into every
    segment. Raises `ValueError` for an id that is not letters, digits, `._-`.
    """

    def __init__(self, store: Store, writer_id: str, *, contract: Contract | None = None) -> None:
        if not _WRITER.fullmatch(writer_id):
            raise ValueError(f"writer id {writer_id!r} must be letters, digits and ._- (it is part of a key)")
        self.writer_id = writer_id
        self._store = store
        self._contract = None if contract is None else contract.to_json()
        self._parts: set[str] = set()  # groups that an append which failed has written
        written = [key for key in store.list(f"{PREFIX}{writer_id}/") if _KEY.fullmatch(key)]
        self._sequence = 1 + int(written[-1][-16:-8]) if written else 0

    def append(self, trajectories: Sequence[Trajectory]) -> str:
        """Writes whole groups as the next segment and returns its key; durable when it returns.

        More than a reader takes goes into several; the key is the last one's. After an error of the store the
        same call may be made again: the groups are then in the log once.
        Raises `segment.SegmentError` for a trajectory that breaks the schema, before anything is written.
        """
        for trajectory in trajectories:
            if trajectory.purpose != "train":
                raise segment.SegmentError(
                    f"{trajectory.trajectory_id} has purpose {trajectory.purpose!r}: the training "
                    "log takes 'train' only"
                )
        key = self._append([t for t in trajectories if t.group_id not in self._parts])
        self._parts.clear()
        return key

    def _append(self, trajectories: Sequence[Trajectory]) -> str:
        while trajectories:
            key = segment_key(self.writer_id, self._sequence)
            try:
                data = segment.encode(
                    trajectories, writer=self.writer_id, sequence=self._sequence, contract=self._contract
                )
            except segment.SegmentTooLarge:
                groups = list(dict.fromkeys(t.group_id for t in trajectories))
                if len(groups) == 1:
                    raise
                first = set(groups[: len(groups) // 2])
                self._append([t for t in trajectories if t.group_id in first])
                return self._append([t for t in trajectories if t.group_id not in first])
            # After an error the sequence stands: tried again, the same groups are found where they arrived.
            written = self._store.create(key, data) or self._store.read(key) == data
            self._sequence += 1
            if written:
                self._parts.update(t.group_id for t in trajectories)
                return key
            logger.warning("%s exists already: another process writes as %s", key, self.writer_id)
        return segment_key(self.writer_id, self._sequence - 1)


def read_segment(store: Store, key: str) -> list[Trajectory]:
    """The rows of a training segment, checked. Raises `SegmentError`, also if the key is absent."""
    data = store.read(key)
    if data is None:
        raise segment.SegmentError(f"{key} is not in store {store.url}")
    return decode_training(data)


def decode_training(data: bytes) -> list[Trajectory]:
    """`segment.decode`, refusing rows that are not for training."""
    trajectories = segment.decode(data)
    for trajectory in trajectories:
        if trajectory.purpose != "train":
            raise segment.SegmentError(
                f"{trajectory.trajectory_id} has purpose {trajectory.purpose!r} in the training "
                "log, expected 'train'"
            )
    return trajectories


@dataclass
class LogReader:
    """Reads what has arrived since the last poll.

    skip: segment keys not to read at all (everything in them is settled already).
    Rows are judged by the schema, and by the run's contract where the store has one.
    quarantined: bad segments by key, with what is wrong with them; never read again.
    quarantined_groups: ids of the groups that readable footers of bad segments call finished.
    segment_rows: rows of each good segment read so far. unreadable: bad segments that do not say which groups
        they finish.
    """

    store: Store
    skip: frozenset[str] = frozenset()
    quarantined: dict[str, str] = field(default_factory=dict)
    quarantined_groups: set[str] = field(default_factory=set)
    segment_rows: dict[str, int] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)
    contract: Contract | None = None

    def poll(self) -> list[TrajectoryRef]:
        """Trajectories of new segments, in key order. A bad segment is quarantined and raises nothing."""
        refs: list[TrajectoryRef] = []
        self.contract = self.contract or read(self.store, Contract, CONTRACT_KEY)
        for key in self.store.list(PREFIX):
            if key in self.segment_rows or key in self.quarantined or key in self.skip:
                continue
            refs.extend(self._read(key))
        return refs

    def _read(self, key: str) -> list[TrajectoryRef]:
        data = self.store.read(key) or b""
        try:
            if not _KEY.fullmatch(key):
                raise segment.SegmentError("its key is not trajectories/<writer>/<8 digits>.parquet")
            trajectories = decode_training(data)
            if self.contract is not None:
                problem = self.contract.problem_of_segment(trajectories, segment.contract_of(data))
                if problem:
                    raise segment.SegmentError(problem)
        except segment.SegmentError as error:
            self.quarantined[key] = str(error)
            groups = _claimed_groups(data)
            self.quarantined_groups.update(groups)
            if not groups:
                self.unreadable.add(key)
            logger.warning(
                "quarantined %s (%d so far): %s. The run goes on without it; look at the worker "
                "that wrote it",
                key,
                len(self.quarantined),
                error,
            )
            return []
        self.segment_rows[key] = len(trajectories)
        return [reference(trajectory, segment=key, row=row) for row, trajectory in enumerate(trajectories)]


def by_writer(keys: Iterable[str]) -> dict[str, list[str]]:
    """Segment keys of each writer, in order. Keys that name none are left out."""
    found: dict[str, list[str]] = {}
    for key in sorted(keys):
        if _KEY.fullmatch(key):
            found.setdefault(key.split("/")[1], []).append(key)
    return found


def _claimed_groups(data: bytes) -> list[str]:
    try:
        return [group_id(prompt) for prompt in segment.finished_prompts(data)]
    except segment.SegmentError:
        return []  # not even the footer can be read
