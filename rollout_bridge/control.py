"""What trainer and fleet tell each other through the store: records, their keys, and how each is checked.

The trainer writes `RunState`, `Credits`, `Refusals` and `EvaluationRequest`; the fleet answers with
`EvaluationResult` and `Ack`. A record was written by another process, so `read` checks its fields and that
it is at its key.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollout_bridge.store import Store, StoreError

logger = logging.getLogger(__name__)

STATE_KEY = "control/state.json"
CREDITS_KEY = "control/credits.json"
CONTRACT_KEY = "control/contract.json"
REFUSALS_PREFIX = "control/refused/"
EVALUATIONS_PREFIX = "control/evaluations/"
RESULTS_PREFIX = "evaluations/"
ACKS_PREFIX = "weights/acks/"

WARM_START, FINISHED = "warm_start", "finished"

_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]


class RecordError(StoreError):
    """A record in the store is not what its key must hold. Names the key, each wrong field and its value."""


class Record(BaseModel):
    """A record of the store; a kind of record is a subclass."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @property
    def key(self) -> str:
        """Where in the store the record belongs."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def parse(cls, key: str, data: bytes) -> Self:
        """The record that `data` at `key` is. Raises `RecordError`."""
        try:
            record = cls.model_validate_json(data)
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, found['loc'])) or 'the record'}: found {str(found['input'])[:80]!r}, "
                f"expected: {found['msg']}"
                for found in error.errors(include_url=False)
            ]
            raise RecordError(
                f"{key} is no {cls.__name__}: {'; '.join(problems)}. Its writer is of another version, or "
                "the object is damaged: delete it if nothing needs it"
            ) from error
        if record.key != key:
            raise RecordError(f"{key} holds the {cls.__name__} of {record.key}")
        return record


AnyRecord = TypeVar("AnyRecord", bound=Record)


class RunState(Record):
    """Where the trainer is. phase: the recipe's name for it, or `FINISHED`: workers and agents then leave.

    rl_step: RL steps taken. version: the newest published. time: of writing, unix seconds.
    """

    phase: Annotated[str, Field(min_length=1)]
    step: _Count
    rl_step: _Count
    version: _Count
    time: _Seconds

    @property
    def key(self) -> str:
        return STATE_KEY

    @property
    def finished(self) -> bool:
        return self.phase == FINISHED


class Credits(Record):
    """How far workers may go: prompt indices below `groups` may be claimed."""

    groups: _Count

    @property
    def key(self) -> str:
        return CREDITS_KEY


class Refusals(Record):
    """Segments of `writer` that the trainer did not take. segment, reason: of the last one."""

    writer: _Name
    segments: _Count
    segment: str
    reason: str

    @property
    def key(self) -> str:
        return f"{REFUSALS_PREFIX}{self.writer}.json"


class EvaluationRequest(Record):
    """Held-out prompts [start, stop), to be answered greedily by exactly policy `version`.

    The agent of the worker that claimed it serves that version until there is a result, or until the request
    has stayed unchanged for `expires_after` seconds. Unclaimed, it holds every agent.
    renewals: by the trainer; each changes the record.
    """

    id: _Name
    version: _Count
    prompts: tuple[_Count, _Count]
    purpose: Literal["eval"] = "eval"
    expires_after: _Seconds
    renewals: _Count = 0

    @model_validator(mode="after")
    def _some_prompts(self) -> Self:
        if self.prompts[0] >= self.prompts[1]:
            raise ValueError(f"prompts {list(self.prompts)} are [start, stop) with start below stop")
        return self

    @property
    def key(self) -> str:
        return f"{EVALUATIONS_PREFIX}{self.id}.json"

    @property
    def result_key(self) -> str:
        return f"{RESULTS_PREFIX}{self.id}/result.json"

    @property
    def claim_key(self) -> str:
        return f"{RESULTS_PREFIX}{self.id}/claim.json"


class EvaluationClaim(Record):
    """The lease of the worker that answers request `id`; over when unchanged for `lease_seconds`.

    agent: which keeps its engine at the version meanwhile; "" if that is not known.
    """

    id: _Name
    worker: _Name
    agent: str
    lease_seconds: _Seconds
    renewals: _Count = 0

    @property
    def key(self) -> str:
        return f"{RESULTS_PREFIX}{self.id}/claim.json"


class EvaluationResult(Record):
    """The answer to the request `id`. The means are over `count` valid rows, None where there is none.

    failed: rows of other status. components: mean of each reward component. truncated: valid rows that a
    limit of tokens ended. error: why nothing was generated.
    """

    id: _Name
    version: _Count
    prompts: tuple[_Count, _Count]
    count: _Count
    failed: _Count
    reward_mean: Annotated[float, Field(allow_inf_nan=False)] | None
    components: dict[str, float]
    mean_tokens: _Seconds | None
    truncated: _Count
    worker: str
    time: _Seconds
    error: str = ""

    @property
    def key(self) -> str:
        return f"{RESULTS_PREFIX}{self.id}/result.json"


class Ack(Record):
    """What an agent serves, and how it fares since its start. version: None before the first.

    pause_ms: of the last updates, without tokens. verified_tensors: digests that matched. fallbacks: to a
    full version, because the chain was broken. setbacks: to an older version, because the newest was out of
    reach.
    """

    agent: _Name
    version: _Count | None
    incarnation: _Count | None
    time: _Seconds
    updates: _Count
    pause_ms: tuple[_Seconds, ...]
    verified_tensors: _Count
    fallbacks: _Count
    setbacks: _Count
    broken_versions: _Count
    errors: _Count
    last_error: str

    @property
    def key(self) -> str:
        return f"{ACKS_PREFIX}{self.agent}.json"


def read(store: Store, kind: type[AnyRecord], key: str) -> AnyRecord | None:
    """The record at `key`, None if absent. Raises `RecordError` naming what is wrong with it."""
    data = store.read(key)
    return None if data is None else kind.parse(key, data)


def readable(store: Store, kind: type[AnyRecord], prefix: str) -> Iterator[AnyRecord]:
    """Every record of `kind` below `prefix`. One that is not well formed is logged and left out."""
    for key in store.list(prefix):
        try:
            record = read(store, kind, key)
        except RecordError as error:
            logger.warning("ignored: %s", error)
            continue
        if record is not None:
            yield record


def read_state(store: Store) -> RunState | None:
    """Where the trainer is, None before it has said so."""
    return read(store, RunState, STATE_KEY)
