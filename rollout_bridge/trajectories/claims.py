"""Prompts are one global stream by index; workers claim ranges of it by conditional create, with leases.

Claims form a chain: each starts where the one before it ends, and its key is its start. A range can
therefore be created once only, whatever sizes workers ask for, and no index is skipped. An expired claim
moves to another worker by compare-and-swap, and only the indices that no segment of its holders finished
are generated again.

A claim has expired when its record has stayed unchanged for its lease, by the monotonic clock of the worker
that looks. Clocks of hosts are never compared. A worker that stands still for a lease causes duplicate work,
never duplicate training (a plan takes one copy of a group).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rollout_bridge.control import CREDITS_KEY, Credits, read
from rollout_bridge.errors import ExpectedError
from rollout_bridge.store import Store, StoreError
from rollout_bridge.trajectories import segment
from rollout_bridge.trajectories.log import PREFIX as SEGMENTS
from rollout_bridge.waiting import Unchanged

logger = logging.getLogger(__name__)

PREFIX = "prompts/claims/"
_KEY = re.compile(re.escape(PREFIX) + r"\d{8,}\.json")


class ClaimError(ExpectedError):
    """The claims in the store do not form a chain; the message names the key and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Indices [start, start + count), held by `worker`, which renews it within `lease_seconds`.

    attempt: 0 for the first holder, one more for each that took it over; holders: writer ids of all of them.
    renewals: moves by the holder; each changes the record. released: given up.
    done: every index is in a segment.
    """

    start: int
    count: int
    worker: str
    lease_seconds: float
    attempt: int = 0
    holders: tuple[str, ...] = ()
    renewals: int = 0
    released: bool = False
    done: bool = False

    @property
    def key(self) -> str:
        return f"{PREFIX}{self.start:08d}.json"

    @property
    def end(self) -> int:
        return self.start + self.count

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "holders": list(self.holders)}

    @classmethod
    def from_json(cls, key: str, value: Any) -> Claim:
        """Raises `ClaimError` unless `value` is the claim that `key` must hold."""
        try:
            claim = cls(**{**value, "holders": tuple(value["holders"])})
            good = claim.key == key and claim.count >= 1 and isinstance(claim.lease_seconds, int | float)
        except (TypeError, KeyError) as error:
            raise ClaimError(f"{key} holds {value!r}, expected a claim ({error!r}); {_REMEDY}") from error
        if not good:
            raise ClaimError(
                f"{key} holds {value!r}, which is not a claim on the range its key says; {_REMEDY}"
            )
        return claim


_REMEDY = "stop the workers, delete this key and the later ones, and start the workers again"


def granted(store: Store) -> int:
    """Prompt indices below this may be claimed; 0 before the trainer grants any."""
    found = read(store, Credits, CREDITS_KEY)
    return 0 if found is None else found.groups


def grant(store: Store, groups: int) -> int:
    """Lets workers claim indices below `groups`; never takes credits back. Returns what is granted now."""
    while True:
        data, generation = store.read_with_generation(CREDITS_KEY)
        current = 0 if data is None else Credits.parse(CREDITS_KEY, data).groups
        if groups <= current or store.swap_json(CREDITS_KEY, Credits(groups=groups).to_json(), generation):
            return max(groups, current)


def claim_keys(store: Store) -> list[str]:
    """Keys of all claims, in order. Other keys below `prompts/claims/` are not ours."""
    return [key for key in store.list(PREFIX) if _KEY.fullmatch(key)]


def read_claims(store: Store, *, skip: Container[str] = ()) -> list[Claim]:
    """All of them, in order, but for the keys of `skip` and damaged ones."""
    claims = []
    for key in claim_keys(store):
        if key in skip:
            continue
        with suppress(ClaimError, StoreError):
            claims.append(Claim.from_json(key, store.read_json(key)))
    return claims


class ClaimBook:
    """One worker's view of the claims.

    worker: its writer id. count: indices to claim at a time. lease_seconds: how long a claim outlives the
    last renewal; renew at a third of it. clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        worker: str,
        *,
        count: int,
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if count < 1 or lease_seconds <= 0:
            raise ValueError(
                f"claim count {count} must be at least 1 and lease_seconds {lease_seconds} above 0"
            )
        self._store = store
        self._worker = worker
        self._count = count
        self._lease = lease_seconds
        self._unchanged = Unchanged(clock)
        self._held: set[tuple[int, int]] = set()  # (start, attempt), not lost, given up or completed
        self._done: dict[str, Claim] = {}

    def acquire(self) -> tuple[Claim, tuple[int, ...]] | None:
        """A claim and its indices left to generate: the oldest expired one, else a new one in the credits.

        None if there is neither.
        """
        while True:
            keys = claim_keys(self._store)
            for key in keys:
                taken = None if key in self._done else self._take_over(key)
                if taken is not None:
                    return taken
            start = self._read(keys[-1])[0].end if keys else 0
            count = min(self._count, granted(self._store) - start)
            if count < 1:
                return None
            claim = Claim(
                start=start,
                count=count,
                worker=self._worker,
                lease_seconds=self._lease,
                holders=(self._worker,),
            )
            if self._store.create_json(claim.key, claim.to_json()):
                self._held.add((claim.start, claim.attempt))
                return claim, tuple(range(claim.start, claim.end))

    def renew(self, claim: Claim) -> Claim | None:
        """The claim with a new lease, None if another worker has it now."""
        return self._move(claim, ends=False)

    def release(self, claim: Claim) -> Claim | None:
        """Gives the claim up: the next worker takes what is unfinished at once."""
        return self._move(claim, released=True)

    def complete(self, claim: Claim) -> Claim | None:
        """Call once every index is in a durable segment."""
        return self._move(claim, done=True)

    def unfinished(self, claim: Claim) -> tuple[int, ...]:
        """Indices of the claim that no readable segment of its holders calls finished."""
        finished: set[int] = set()
        for holder in claim.holders:
            for key in self._store.list(f"{SEGMENTS}{holder}/"):
                data = self._store.read(key)
                try:
                    finished.update(() if data is None else segment.finished_prompts(data))
                except segment.SegmentError as error:
                    logger.warning("%s finishes nothing: %s", key, error)
        return tuple(index for index in range(claim.start, claim.end) if index not in finished)

    def _take_over(self, key: str) -> tuple[Claim, tuple[int, ...]] | None:
        claim, generation = self._read(key)
        if claim.done or not self._expired(claim):
            return None
        holders = claim.holders if self._worker in claim.holders else (*claim.holders, self._worker)
        mine = replace(
            claim,
            worker=self._worker,
            lease_seconds=self._lease,
            attempt=claim.attempt + 1,
            holders=holders,
            renewals=0,
            released=False,
        )
        if not self._store.swap_json(key, mine.to_json(), generation):
            return None
        self._held.add((mine.start, mine.attempt))
        unfinished = self.unfinished(mine)
        if unfinished:
            logger.info(
                "%s: %s takes over from %s, %d left", key, self._worker, claim.worker, len(unfinished)
            )
            return mine, unfinished
        self.complete(mine)
        return None

    def _expired(self, claim: Claim) -> bool:
        """A claim that this worker holds never has, however late the worker is to renew it."""
        if claim.released:
            return True
        unchanged = self._unchanged.seconds(claim.key, claim)
        mine = claim.worker == self._worker and (claim.start, claim.attempt) in self._held
        return not mine and unchanged >= claim.lease_seconds

    def _move(self, claim: Claim, *, ends: bool = True, **changes: Any) -> Claim | None:
        """Compare-and-swap, only while the store still says this worker holds this attempt.

        ends: this worker holds the claim no longer.
        """
        current, generation = self._read(claim.key)
        moved = None
        if (current.worker, current.attempt) == (claim.worker, claim.attempt):
            changed = replace(current, renewals=current.renewals + 1, **changes)
            moved = changed if self._store.swap_json(claim.key, changed.to_json(), generation) else None
        if ends or moved is None:
            self._held.discard((claim.start, claim.attempt))
        return moved

    def _read(self, key: str) -> tuple[Claim, bytes]:
        if key in self._done:
            return self._done[key], b""
        value, generation = self._store.read_json_with_generation(key)
        claim = Claim.from_json(key, value)
        if claim.done:
            self._done[key] = claim
        return claim, generation
