"""Segments: trajectories <-> Parquet bytes that pandas and DuckDB open, checked before they are used.

The footer's metadata say which prompt indices the segment finished, so that a reissued claim skips them.
Whether bytes are a good segment is a function of the bytes alone: every reader quarantines the same ones.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_bridge.errors import ExpectedError
from rollout_bridge.trajectories.schema import SCHEMA_VERSION, Status, Trajectory, Turn, TurnKind, group_id

FORMAT = b"rollout_bridge.trajectories"
# Limits of what a reader decodes; the segments of a worker are far below.
MAX_ROWS = 1 << 17
MAX_UNCOMPRESSED_BYTES = 4 << 30

SCHEMA = pa.schema(
    [
        ("trajectory_id", pa.string()),
        ("group_id", pa.string()),
        ("prompt_index", pa.int64()),
        ("member", pa.int32()),
        ("task", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("trainable", pa.list_(pa.bool_())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("turns", pa.list_(pa.struct([("kind", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))),
        ("temperature", pa.float64()),
        ("seed", pa.int64()),
        ("max_tokens", pa.int32()),
        ("finish_reason", pa.string()),
        ("kv_policy", pa.string()),
        ("status", pa.string()),
        ("reward", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("engine", pa.string()),
        ("worker", pa.string()),
        ("created_at", pa.float64()),
        ("generate_seconds", pa.float64()),
        ("purpose", pa.string()),
        ("routed_experts", pa.list_(pa.int16())),
        ("routed_experts_shape", pa.list_(pa.int32())),
        ("metadata", pa.map_(pa.string(), pa.string())),
    ]
)
_PER_TOKEN = {
    "token_ids": np.int32,
    "trainable": np.bool_,
    "behavior_logprobs": np.float32,
    "versions": np.int32,
}
_AS_THEY_ARE = [
    field.name
    for field in SCHEMA
    if field.name not in _PER_TOKEN
    and field.name not in {"turns", "status", "rewards", "metadata", "routed_experts", "routed_experts_shape"}
]


# What a segment may lack that a worker of another version wrote. Columns that are not known are not read.
_DEFAULTS: dict[str, Any] = {
    "max_tokens": 0,
    "finish_reason": "",
    "kv_policy": "",
    "rewards": [],
    "engine": "",
    "worker": "",
    "generate_seconds": 0.0,
    "purpose": "train",
    "routed_experts": None,
    "routed_experts_shape": None,
    "metadata": [],
}


class SegmentError(ExpectedError, ValueError):
    """These bytes are not a good segment; the message says what was found and what was expected."""


class SegmentTooLarge(SegmentError):
    """More than a reader takes; write the groups as several segments."""


def encode(
    trajectories: Sequence[Trajectory],
    *,
    writer: str,
    sequence: int,
    contract: Mapping[str, Any] | None = None,
) -> bytes:
    """Parquet bytes (zstd) of whole groups, the same for the same trajectories.

    contract: of the writer, for its readers. Raises `SegmentError`, `SegmentTooLarge` for more than a reader
    takes.
    """
    _check_groups(trajectories)
    for row, trajectory in enumerate(trajectories):
        _check(trajectory, row)
    if len(trajectories) > MAX_ROWS:
        raise SegmentTooLarge(f"{len(trajectories)} rows, a reader takes at most {MAX_ROWS}")
    columns: dict[str, list[object]] = {field.name: [] for field in SCHEMA}
    for t in trajectories:
        for name in _AS_THEY_ARE:
            columns[name].append(getattr(t, name))
        for name, dtype in _PER_TOKEN.items():
            columns[name].append(np.asarray(getattr(t, name), dtype))
        columns["turns"].append([{"kind": u.kind.value, "start": u.start, "end": u.end} for u in t.turns])
        columns["status"].append(t.status.value)
        columns["rewards"].append(sorted(t.rewards.items()))
        columns["metadata"].append(sorted(t.metadata.items()))
        experts = t.routed_experts
        columns["routed_experts"].append(
            None if experts is None else np.asarray(experts, np.int16).reshape(-1)
        )
        columns["routed_experts_shape"].append(None if experts is None else list(experts.shape))
    table = pa.table([pa.array(columns[f.name], f.type) for f in SCHEMA], schema=SCHEMA)
    table = table.replace_schema_metadata(
        {
            "format": FORMAT,
            "schema_version": str(SCHEMA_VERSION),
            "writer": writer,
            "sequence": str(sequence),
            "finished": json.dumps(sorted({t.prompt_index for t in trajectories})),
            **({} if contract is None else {"contract": json.dumps(contract, sort_keys=True)}),
        }
    )
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    data = sink.getvalue()
    if (size := _uncompressed(pq.read_metadata(io.BytesIO(data)))) > MAX_UNCOMPRESSED_BYTES:
        raise SegmentTooLarge(f"{size} bytes uncompressed, a reader takes at most {MAX_UNCOMPRESSED_BYTES}")
    return data


def _uncompressed(metadata: Any) -> int:
    return sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))


def decode(data: bytes) -> list[Trajectory]:
    """The trajectories of a segment, every row checked. Raises `SegmentError` on anything unexpected."""
    parquet = _open(data)
    finished = _finished(parquet)
    try:
        table = _completed(
            parquet.read(columns=[name for name in parquet.schema_arrow.names if name in SCHEMA.names])
        )
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SegmentError(f"the data pages do not decode: {error}") from error
    try:
        trajectories = _rows(table)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise SegmentError(f"a row does not decode: {type(error).__name__}: {error}") from error
    for row, trajectory in enumerate(trajectories):
        _check(trajectory, row)
    _check_groups(trajectories)
    found = {t.prompt_index for t in trajectories}
    if found != set(finished):
        raise SegmentError(
            f"the footer says prompts {sorted(finished)} are finished, the rows hold {sorted(found)}"
        )
    return trajectories


def contract_of(data: bytes) -> dict[str, Any] | None:
    """The contract of the segment's writer, None if it has none. Raises `SegmentError`."""
    text = (_open(data).schema_arrow.metadata or {}).get(b"contract")
    try:
        found = None if text is None else json.loads(text)
    except ValueError as error:
        raise SegmentError(f"the footer's contract is no JSON: {error}") from error
    if not (found is None or isinstance(found, dict)):
        raise SegmentError(f"the footer's contract is {type(found).__name__}, expected an object")
    return found


def _completed(table: pa.Table) -> pa.Table:
    """With every column of `SCHEMA`, in its order."""
    for field in SCHEMA:
        if field.name not in table.column_names:
            values = pa.array([_DEFAULTS[field.name]] * table.num_rows, field.type)
            table = table.append_column(field, values)
    return table.select(SCHEMA.names)


def finished_prompts(data: bytes) -> tuple[int, ...]:
    """Prompt indices the footer of a segment calls finished. Raises `SegmentError`."""
    return _finished(_open(data))


def row_count(data: bytes) -> int:
    """Rows by the footer of a segment, 0 if even that cannot be read. For counting what is quarantined."""
    try:
        return pq.read_metadata(io.BytesIO(data)).num_rows
    except (pa.ArrowException, OSError, ValueError):
        return 0


def _open(data: bytes) -> pq.ParquetFile:
    try:
        parquet = pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SegmentError(f"{len(data)} bytes are not a Parquet file: {error}") from error
    metadata = parquet.metadata
    size = _uncompressed(metadata)
    if not 0 < metadata.num_rows <= MAX_ROWS:
        raise SegmentError(f"{metadata.num_rows} rows, expected 1 to {MAX_ROWS}")
    if not 0 <= size <= MAX_UNCOMPRESSED_BYTES:
        raise SegmentError(f"{size} bytes uncompressed, expected at most {MAX_UNCOMPRESSED_BYTES}")
    found = parquet.schema_arrow
    missing = [name for name in SCHEMA.names if name not in found.names and name not in _DEFAULTS]
    other = [
        name
        for name in found.names
        if name in SCHEMA.names and found.field(name).type != SCHEMA.field(name).type
    ]
    if missing or other or len(set(found.names)) < len(found.names):
        raise SegmentError(
            f"columns {missing} are missing and {other} have other types, expected {SCHEMA}".replace(
                "\n", ", "
            )
        )
    return parquet


def _finished(parquet: pq.ParquetFile) -> tuple[int, ...]:
    metadata = parquet.schema_arrow.metadata or {}
    found = (metadata.get(b"format"), metadata.get(b"schema_version"))
    if found != (FORMAT, str(SCHEMA_VERSION).encode()):
        raise SegmentError(f"format and schema version are {found}, expected {(FORMAT, SCHEMA_VERSION)}")
    try:
        finished = json.loads(metadata[b"finished"])
    except (KeyError, ValueError) as error:
        raise SegmentError(f"the footer does not say which prompts are finished: {error!r}") from error
    if not (isinstance(finished, list) and all(type(index) is int and index >= 0 for index in finished)):
        raise SegmentError(f"the footer's finished prompts are {finished!r}, expected a list of indices")
    return tuple(finished)


def _rows(table: pa.Table) -> list[Trajectory]:
    plain = {
        name: table[name].to_pylist() for name in SCHEMA.names if name not in {*_PER_TOKEN, "routed_experts"}
    }
    arrays = {name: _split(table[name]) for name in (*_PER_TOKEN, "routed_experts")}
    rows = []
    for i in range(table.num_rows):
        shape = plain["routed_experts_shape"][i]
        if (shape is None) != (arrays["routed_experts"][i] is None):
            raise ValueError(
                f"row {i}: routed_experts and routed_experts_shape must be both set or both null"
            )
        fields: dict[str, Any] = {name: plain[name][i] for name in _AS_THEY_ARE}
        fields |= {name: _array(arrays[name][i], dtype, name, i) for name, dtype in _PER_TOKEN.items()}
        if shape is not None:
            flat = _array(arrays["routed_experts"][i], np.int16, "routed_experts", i)
            fields["routed_experts"] = flat.reshape([_non_negative(axis) for axis in shape])
        rows.append(
            Trajectory(
                turns=tuple(Turn(TurnKind(u["kind"]), u["start"], u["end"]) for u in plain["turns"][i]),
                status=Status(plain["status"][i]),
                rewards=dict(plain["rewards"][i]),
                metadata=dict(plain["metadata"][i]),
                **fields,
            )
        )
    return rows


def _split(column: pa.ChunkedArray) -> list[pa.Array | None]:
    return [scalar.values if scalar.is_valid else None for scalar in column]


def _array(values: pa.Array | None, dtype: type, name: str, row: int) -> np.ndarray:
    if values is None or values.null_count:
        raise ValueError(f"row {row}: {name} holds nulls")
    return np.array(values.to_numpy(zero_copy_only=False), dtype)


def _non_negative(axis: int) -> int:
    if axis < 0:
        raise ValueError(f"routed_experts_shape has axis {axis}")
    return axis


def _check(t: Trajectory, row: int) -> None:
    """Raises `SegmentError` unless the trajectory keeps what `schema.Trajectory` promises."""

    def expect(condition: bool | np.bool_, message: str) -> None:
        if not condition:
            raise SegmentError(f"row {row} ({t.trajectory_id}): {message}")

    text = [t.trajectory_id, t.group_id, t.task, t.finish_reason, t.kv_policy, t.engine, t.worker, t.purpose]
    expect(all(isinstance(value, str) for value in text), "a text field is missing")
    numbers = [t.prompt_index, t.member, t.temperature, t.seed, t.max_tokens, t.reward, t.created_at]
    numbers += [t.generate_seconds, *t.rewards.values()]
    expect(
        all(value is not None and np.isfinite(value) for value in numbers),
        "a number is missing or not finite",
    )
    expect(
        t.prompt_index >= 0 and t.group_id == group_id(t.prompt_index),
        f"group {t.group_id} is not its prompt's",
    )
    expect(
        t.member >= 0 and t.trajectory_id == f"{t.group_id}/{t.member}",
        f"is not member {t.member} of its group",
    )
    tokens = len(t.token_ids)
    for name in _PER_TOKEN:
        shape = np.shape(getattr(t, name))
        expect(shape == (tokens,), f"{name} has shape {shape}, expected ({tokens},)")
    expect(tokens > 0 and np.min(t.token_ids) >= 0, "token ids must be at least one, none negative")
    trainable = np.asarray(t.trainable, bool)
    expect(np.isfinite(t.behavior_logprobs).all(), "behavior_logprobs are not finite")
    expect((np.asarray(t.behavior_logprobs) <= 1e-3).all(), "behavior_logprobs are above 0")
    expect(
        (np.asarray(t.behavior_logprobs)[~trainable] == 0).all(),
        "behavior_logprobs of prompt tokens are not 0",
    )
    expect((np.asarray(t.versions)[trainable] >= 0).all(), "a trainable token has no version")
    expect((np.asarray(t.versions)[~trainable] == -1).all(), "a token that is not trainable has a version")
    if t.status in (Status.OK, Status.MALFORMED):
        expect(trainable.any(), f"status {t.status} without a trainable token")
    ends = [turn.end for turn in t.turns]
    expect(
        [turn.start for turn in t.turns] == [0, *ends[:-1]] and ends[-1:] == [tokens], "turns do not cover it"
    )
    expect(ends == sorted(ends), "turns overlap")
    if t.routed_experts is not None:
        shape = t.routed_experts.shape
        expect(
            len(shape) == 3 and shape[0] == tokens,
            f"routed_experts has shape {shape}, expected ({tokens}, L, k)",
        )
        expect((t.routed_experts >= -1).all(), "routed_experts has an index below -1")


def _check_groups(trajectories: Sequence[Trajectory]) -> None:
    """Whole groups side by side: members 0, 1, ... in order, and no group twice."""
    seen: set[int] = set()
    previous: Trajectory | None = None
    for row, t in enumerate(trajectories):
        starts = previous is None or previous.prompt_index != t.prompt_index
        if starts and t.prompt_index in seen:
            raise SegmentError(f"row {row} ({t.trajectory_id}): its group is in the segment twice")
        expected = 0 if previous is None or starts else previous.member + 1
        if t.member != expected:
            raise SegmentError(f"row {row} ({t.trajectory_id}): member {t.member}, expected {expected}")
        seen.add(t.prompt_index)
        previous = t
