"""Reads collectives out of the text of an optimised HLO module: kind, payload, device groups, executions.

Text is the only form that every backend of jax prints. Three notations of device groups occur side by side:

  {{0,1},{2,3}}                          a list
  [2,4]<=[4,2]T(1,0)                     iota: arange(8).reshape(4,2).transpose(1,0).reshape(2,4)
  mesh['a'=2,'b'=4] {'b'}                axes of a mesh

In the last, 'b':(2)2 is the inner half of an axis of 4, and `, device_ids=(0,2,1,3)` or an iota after the
bracket orders the devices of the mesh.

Ids are positions in the program's device order, which is the flattened order of its mesh. A TPU program that
spans slices is compiled for one of them: its ids count the devices of a slice, and a collective across slices
is a `send` to the host whose attributes name it.
"""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np

from sharding.errors import ShardingError

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# The result of these asynchronous starts is (operands, results, ...); of others it is only the results.
_START_CARRIES_OPERANDS = ("all-gather-start", "collective-permute-start")
_MEGASCALE = re.compile(r'_xla_megascale_transfer_type="([A-Z_]+)"')
_MEGASCALE_KINDS = {"ONE_TO_ONE": "collective-permute"}  # the others are named as in KINDS
# "{1,2}x{0:7}": these slices, all devices; {{100000,200000},...}: devices by slice x 100000 + number.
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}x')
_SLICE_DEVICES = re.compile(r"_xla_megascale_target=\{(\{.*?\})\}")
_DEVICES_PER_SLICE_ID = 100_000
_OPCODES = frozenset(KINDS) | frozenset(f"{kind}-start" for kind in KINDS)

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*->.*\{\s*$")
_CALLED = re.compile(
    r"(?:calls|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,<=]*)\]")
_LIST = re.compile(r"\{([\d,]*)\}")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One collective of a module.

    Attributes:
      name: of the instruction.
      kind: one of KINDS.
      groups: int array [groups, devices]; for a permute [pairs, 2] of source and target. Across slices, the
        same of slices, counted from zero.
      bytes: payload of one device: gathered (result), scattered (operand), or otherwise moved or reduced.
      executions: how often one run of the program performs it; None inside a loop of unknown length.
      source: the jax operation it came from, where the compiler kept it.
    """

    name: str
    kind: str
    groups: np.ndarray
    bytes: int
    executions: int | None
    source: str
    across_slices: bool = False


@dataclasses.dataclass
class _Computation:
    collectives: list[tuple[str, str, str, str]] = dataclasses.field(default_factory=list)
    calls: list[str] = dataclasses.field(default_factory=list)
    loops: list[tuple[str, str, int | None]] = dataclasses.field(default_factory=list)
    constants: dict[str, int] = dataclasses.field(default_factory=dict)
    root_operands: str = ""


def num_partitions(text: str) -> int:
    """Devices that the module is compiled for."""
    header = re.match(r"HloModule [^\n]*num_partitions=(\d+)", text)
    return int(header[1]) if header else 1


def instructions(text: str) -> tuple[Instruction, ...]:
    """Collectives that a run of the module reaches.

    Loops run their known trip count where the compiler recorded one; else the constant that their condition
    compares with, which is the trip count of `lax.scan` and of `fori_loop` from zero. Of a conditional, every
    branch counts.

    Args:
      text: `compiled.as_text()`.

    Raises ShardingError if there is no entry computation or a collective cannot be read.
    """
    devices = num_partitions(text)
    computations, entry = _computations(text)
    runs = _executions(computations, entry)
    return tuple(
        _instruction(owner, runs[owner], devices, *collective)
        for owner, computation in computations.items()
        if runs.get(owner, 0) != 0
        for collective in computation.collectives
    )


def _instruction(
    owner: str, executions: int | None, devices: int, name: str, opcode: str, shape: str, attributes: str
) -> Instruction:
    payload, source = _payload(opcode, shape), _source(attributes)
    if opcode == "send":
        transfer: str = _MEGASCALE.findall(attributes)[0]
        kind = _MEGASCALE_KINDS.get(transfer, transfer.lower().replace("_", "-"))
        groups = _slice_groups(attributes)
        if kind == "all-gather":
            payload *= groups.shape[1]
        return Instruction(name, kind, groups, payload, executions, source, across_slices=True)
    kind = opcode.removesuffix("-start")
    groups = _groups(kind, attributes, devices)
    if kind == "reduce-scatter":
        payload *= groups.shape[1]
    # The TPU compiler keeps a reduce-scatter as a fusion of this name around all-reduce and slice.
    if kind == "all-reduce" and owner.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    return Instruction(name, kind, groups, payload, executions, source)


def _computations(text: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry, current = "", _Computation()
    for line in text.splitlines():
        if not line.startswith(" "):
            if header := _HEADER.match(line):
                current = computations.setdefault(header[2], _Computation())
                entry = header[2] if header[1] else entry
            continue
        _read_line(line.strip(), current)
    if not entry:
        raise ShardingError(
            "no ENTRY computation in the HLO text; pass compiled.as_text() of a compiled program"
        )
    return computations, entry


def _read_line(line: str, computation: _Computation) -> None:
    name, equals, rest = line.removeprefix("ROOT ").partition(" = ")
    if not equals:
        return
    shape_end = _shape_end(rest)
    opcode, _, arguments = rest[shape_end:].lstrip().partition("(")
    if line.startswith("ROOT "):
        computation.root_operands = arguments.partition(")")[0]
    if opcode in _OPCODES or (opcode == "send" and _MEGASCALE.search(arguments)):
        computation.collectives.append((name.lstrip("%"), opcode, rest[:shape_end], arguments))
    elif opcode == "while" and (loop := _LOOP.search(arguments)):
        trips = _TRIPS.search(arguments)
        computation.loops.append((loop[2], loop[1], int(trips[1]) if trips else None))
    elif opcode == "constant" and (value := re.match(r"(\d+)\)", arguments)):
        computation.constants[name.lstrip("%")] = int(value[1])
    if "=" in arguments:
        for called in _CALLED.findall(arguments):
            computation.calls += re.findall(r"[\w.\-]+", called)


def _shape_end(rest: str) -> int:
    """Where the result shape ends: a balanced tuple, or everything up to a space."""
    if not rest.startswith("("):
        return max(rest.find(" "), 0)
    depth = 0
    for position, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position + 1
    return len(rest)


def _executions(computations: dict[str, _Computation], entry: str) -> dict[str, int | None]:
    """How often each computation runs, callers before callees; the call graph has no cycles."""
    order: list[str] = []
    seen: set[str] = set()

    def edges(name: str) -> list[tuple[str, int | None]]:
        computation = computations[name]
        found: list[tuple[str, int | None]] = [(called, 1) for called in computation.calls]
        for body, condition, trips in computation.loops:
            found.append((body, trips if trips is not None else _trips(computations.get(condition))))
        return [(called, times) for called, times in found if called in computations]

    stack = [(entry, False)]
    while stack:
        name, finished = stack.pop()
        if finished:
            order.append(name)
        elif name not in seen:
            seen.add(name)
            stack.append((name, True))
            stack += [(called, False) for called, _ in edges(name)]
    runs: dict[str, int | None] = {name: 0 for name in order}
    runs[entry] = 1
    for name in reversed(order):
        for called, times in edges(name):
            before, here = runs[called], runs[name]
            runs[called] = None if before is None or here is None or times is None else before + here * times
    return runs


def _trips(condition: _Computation | None) -> int | None:
    """The constant a loop condition compares its counter with, if that is all the condition does."""
    if condition is None:
        return None
    operands = re.findall(r"[\w.\-]+", condition.root_operands)
    bounds = [condition.constants[name] for name in operands if name in condition.constants]
    return bounds[0] if len(bounds) == 1 else None


def _payload(opcode: str, shape: str) -> int:
    if opcode in _START_CARRIES_OPERANDS:
        shape = _elements(shape)[1]
    elif opcode == "send":  # (buffer, context, token)
        shape = _elements(shape)[0]
    bits = 0
    for letters, width, dimensions in _ARRAY.findall(shape):
        size = math.prod(int(d.removeprefix("<=")) for d in dimensions.split(",") if d)
        bits += size * (int(width) if width else 8 if letters == "pred" else 0)
    return -(-bits // 8)


def _elements(shape: str) -> list[str]:
    """Top-level elements of a tuple shape."""
    parts, depth, start = [], 0, 1
    for position, character in enumerate(shape):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            parts.append(shape[start:position])
            start = position + 1
    return parts


def _source(attributes: str) -> str:
    match = re.search(r'op_name="([^"]*)"', attributes)
    return match[1] if match else ""


def _groups(kind: str, attributes: str, num_devices: int) -> np.ndarray:
    key = "source_target_pairs=" if kind == "collective-permute" else "replica_groups="
    start = attributes.find(key)
    if start < 0:
        return np.arange(num_devices).reshape(1, -1)
    return parse_groups(attributes[start + len(key) :], num_devices)


def _slice_groups(attributes: str) -> np.ndarray:
    if slices := _SLICES.search(attributes):
        ids: list[int] = []
        for part in slices[1].split(","):
            low, _, high = part.partition(":")
            ids += range(int(low), int(high or low) + 1)
        return np.array([ids]) - 1
    if devices := _SLICE_DEVICES.search(attributes):
        rows = [_numbers(row) for row in devices[1].split("},{")]
        return np.unique(np.array(rows) // _DEVICES_PER_SLICE_ID - 1, axis=0)
    raise ShardingError(f"a transfer between slices in an unknown notation: {attributes[:500]}")


def parse_groups(text: str, num_devices: int) -> np.ndarray:
    """Device groups [groups, devices] written at the start of `text`, in any of the three notations."""
    if text.startswith("mesh["):
        return _mesh_groups(text)
    if text.startswith("["):
        shape, _, source = text.partition("<=")
        return _iota(source).reshape(_numbers(shape))
    if text.startswith("{{"):
        rows = [_numbers(group) for group in _LIST.findall(text[: text.index("}}") + 2])]
        if len({len(row) for row in rows}) != 1:
            raise ShardingError(f"device groups of unequal size: {text[:200]}")
        return np.array(rows)
    if text.startswith("{}"):
        return np.arange(num_devices).reshape(1, -1)
    raise ShardingError(f"device groups in an unknown notation: {text[:200]}")


def _iota(text: str) -> np.ndarray:
    """`[4,2]T(1,0)...`, or `[8]...`: a transposed arange, flattened."""
    match = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        raise ShardingError(f"device groups in an unknown iota notation: {text[:200]}")
    shape = _numbers(match[1])
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose(_numbers(match[2])) if match[2] else ids).reshape(-1)


def _mesh_groups(text: str) -> np.ndarray:
    match = re.match(
        r"mesh\[([^\]]*)\](?:, ?device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))? ?\{([^}]*)\}", text
    )
    if match is None:
        raise ShardingError(f"device groups in an unknown mesh notation: {text[:200]}")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", match[1])}
    reduced = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", match[3])
    # Each axis is cut into (before, part, after), so that a group may span part of an axis.
    cuts: dict[str, list[int]] = {name: [1] for name in sizes}
    for name, before, part in reduced:
        edges = [1, int(before), int(before) * int(part)] if part else [1, sizes[name]]
        cuts[name] = sorted(set(cuts[name]) | set(edges))
    dimensions: list[int] = []
    location: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        for low, high in zip(cuts[name], [*cuts[name][1:], size], strict=True):
            location[name, low] = len(dimensions)
            dimensions.append(high // low)
    inside: list[int] = []
    for name, before, part in reduced:
        low, stop = (int(before), int(before) * int(part)) if part else (1, sizes[name])
        inside += [location[name, cut] for cut in cuts[name] if low <= cut < stop]
    if match[2] is None:
        ids = np.arange(math.prod(sizes.values()))
    else:
        ids = _iota(match[2]) if match[2].startswith("[") else np.array(_numbers(match[2]))
    outside = [axis for axis in range(len(dimensions)) if axis not in inside]
    group_size = math.prod(dimensions[axis] for axis in inside)
    return ids.reshape(dimensions).transpose(outside + inside).reshape(-1, group_size)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
