"""Options of a class that a config names, read from a mapping into the class's own dataclass.

A class declares its options as a dataclass, which may hold others. `read` checks a mapping against the
annotations and finds every problem at once. Understood are int, float, bool, str, None, Any, Literal, enums,
`list`, `tuple`, `dict` and `Mapping` of those, unions, and dataclasses. Ranges belong in `__post_init__`,
which raises `ValueError("field: what is wrong and what is allowed")`.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rollout_bridge.errors import ExpectedError

T = TypeVar("T")

_PLAIN = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


class OptionsError(ExpectedError, ValueError):
    """Options that cannot be used. `problems` holds one line for each, `<field path>: <what is wrong>`."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class _Wrong(Exception):
    """Problems found in one value, as (path below it, message)."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        self.problems = problems


def read(options_class: type[T], values: Mapping[str, Any] | None, *, where: str) -> T:
    """An instance of the dataclass `options_class` from `values`; None is the same as an empty mapping.

    where: path of the mapping in the config, such as `environment`; errors begin with it.

    Raises `OptionsError` with every problem found, and `TypeError` where `options_class` itself is unusable.
    """
    if not (isinstance(options_class, type) and dataclasses.is_dataclass(options_class)):
        raise TypeError(f"{where}: {options_class!r} declares options, but it is not a dataclass")
    try:
        return _dataclass(options_class, {} if values is None else values)
    except _Wrong as wrong:
        raise OptionsError([f"{_join(where, path)}: {message}" for path, message in wrong.problems]) from None


def shown(value: Any) -> str:
    """The value as YAML writes it, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _dataclass(kind: Any, values: Any) -> Any:
    if isinstance(values, kind):
        return values
    if not isinstance(values, Mapping):
        raise _Wrong([("", f"{shown(values)} is not a mapping")])
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    annotations = _annotations(kind)
    problems: list[tuple[str, str]] = []
    problems += [(str(key), _unknown(str(key), list(fields))) for key in values if key not in fields]
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            try:
                arguments[name] = _convert(annotations[name], values[name])
            except _Wrong as wrong:
                problems += [(_join(name, path), message) for path, message in wrong.problems]
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append((name, f"missing; {_describe(annotations[name])} is required"))
    if problems:
        raise _Wrong(problems)
    try:
        return kind(**arguments)
    except ValueError as error:
        name, colon, message = str(error).partition(": ")
        named = colon and name.split(".")[0] in fields
        raise _Wrong([(name, message) if named else ("", str(error))]) from error


def _annotations(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except NameError as error:
        raise TypeError(
            f"options {kind.__module__}.{kind.__qualname__}: {error}; define or import what its annotations "
            "name at the top of its module"
        ) from error


def _unknown(key: str, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    return f"unknown key; allowed here: {', '.join(allowed)}" if allowed else "unknown key; none is allowed"


def _convert(annotation: Any, value: Any) -> Any:
    """`value` as `annotation` says. Raises `_Wrong`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or annotation is object:
        return value
    if origin in (typing.Union, types.UnionType):
        return _union(annotation, arguments, value)
    if origin is typing.Literal:
        if any(value == allowed and type(value) is type(allowed) for allowed in arguments):
            return value
        raise _Wrong([("", f"{shown(value)} is not {_describe(annotation)}")])
    if annotation in _PLAIN:
        return _plain(annotation, value)
    if dataclasses.is_dataclass(annotation):
        return _dataclass(annotation, value)
    kind = origin or annotation
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(value)
        except ValueError:
            raise _Wrong([("", f"{shown(value)} is not {_describe(annotation)}")]) from None
    if kind in (list, tuple, Sequence):
        return _sequence(annotation, kind, arguments, value)
    if kind in (dict, Mapping):
        return _mapping(annotation, arguments, value)
    raise TypeError(f"option of type {annotation!r} cannot be read from a config; {__name__} says which can")


def _plain(kind: type, value: Any) -> Any:
    if kind is float and type(value) in (int, float):
        if math.isfinite(value):
            return float(value)
        raise _Wrong([("", f"{shown(value)} is not a finite number")])
    if type(value) is not kind:
        raise _Wrong([("", f"{shown(value)} is not {_PLAIN[kind]}")])
    return value


def _union(annotation: Any, alternatives: Sequence[Any], value: Any) -> Any:
    if type(value) in alternatives:
        return _convert(type(value), value)
    failures = []
    for alternative in alternatives:
        try:
            return _convert(alternative, value)
        except _Wrong as wrong:
            failures.append((alternative, wrong))
    # A problem inside the only alternative of the value's shape says more than a list of alternatives.
    inside = [wrong for _, wrong in failures if any(path for path, _ in wrong.problems)]
    if len(inside) == 1:
        raise inside[0]
    raise _Wrong([("", f"{shown(value)} is not {_describe(annotation)}")])


def _sequence(annotation: Any, kind: Any, arguments: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise _Wrong([("", f"{shown(value)} is not {_describe(annotation)}")])
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            raise _Wrong([("", f"{shown(value)} has {len(value)} items, expected {len(arguments)}")])
        kinds = list(arguments)
    else:
        kinds = [arguments[0] if arguments else Any] * len(value)
    items = _items(
        (str(index), item, kind) for index, (item, kind) in enumerate(zip(value, kinds, strict=True))
    )
    return list(items.values()) if kind is list else tuple(items.values())


def _mapping(annotation: Any, arguments: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise _Wrong([("", f"{shown(value)} is not {_describe(annotation)}")])
    key_kind, item_kind = arguments or (Any, Any)
    keys = _items((str(key), key, key_kind) for key in value)
    items = _items((str(key), item, item_kind) for key, item in value.items())
    return {keys[name]: item for name, item in items.items()}


def _items(items: Any) -> dict[str, Any]:
    """Each (name, value, annotation) converted, by name. Raises `_Wrong` with the problems of all."""
    converted, problems = {}, []
    for name, value, annotation in items:
        try:
            converted[name] = _convert(annotation, value)
        except _Wrong as wrong:
            problems += [(_join(name, path), message) for path, message in wrong.problems]
    if problems:
        raise _Wrong(problems)
    return converted


def _describe(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(alternative) for alternative in arguments)
    if origin is typing.Literal:
        return f"one of {', '.join(str(allowed) for allowed in arguments)}"
    kind = origin or annotation
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"one of {', '.join(str(member.value) for member in kind)}"
    if kind in (list, tuple, Sequence):
        if kind is tuple and arguments and arguments[-1] is not Ellipsis:
            return f"a list of {len(arguments)} items"
        return f"a list of {_describe(arguments[0])}" if arguments else "a list"
    if kind in (dict, Mapping) or dataclasses.is_dataclass(kind):
        return "a mapping"
    return "a value"


def _join(path: str, below: str) -> str:
    return f"{path}.{below}" if path and below else path or below
