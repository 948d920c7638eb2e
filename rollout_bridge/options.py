"""Options of a class that a config names, read from a mapping into the class's own dataclass.

A class declares its options as a dataclass, which may hold others. `read` checks a mapping against the
annotations and finds every problem at once. Values are checked as JSON is by pydantic in strict mode: a list
becomes the declared tuple, text the declared enum member, and nothing else is converted. Ranges belong in
`__post_init__`, which raises `ValueError("field: what is wrong and what is allowed")`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ConfigDict, PydanticUserError, ValidationError, create_model

from rollout_bridge.errors import ExpectedError

T = TypeVar("T")

# What pydantic's kinds of findings say was expected.
WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "none_required": "null",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dataclass_type": "a mapping",
}


class OptionsError(ExpectedError, ValueError):
    """Options that cannot be used. `problems` holds one line for each, `<field path>: <what is wrong>`."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def read(options_class: type[T], values: Mapping[str, Any] | None, *, where: str) -> T:
    """An instance of the dataclass `options_class` from `values`; None is the same as an empty mapping.

    where: path of the mapping in the config, such as `environment`; errors begin with it.

    Raises `OptionsError` with every problem found, and `TypeError` where `options_class` itself is unusable.
    """
    if not (isinstance(options_class, type) and dataclasses.is_dataclass(options_class)):
        raise TypeError(f"{where}: {options_class!r} declares options, but it is not a dataclass")
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    try:
        reader = create_model("Reader", __config__=config, options=(options_class, ...))
    except (NameError, PydanticUserError) as error:
        raise TypeError(
            f"options {options_class.__module__}.{options_class.__qualname__}: {error}; annotate with what "
            "JSON can hold, defined or imported at the top of the module"
        ) from error
    document = json.dumps({"options": {} if values is None else values}, default=str)
    try:
        return reader.model_validate_json(document).options  # type: ignore[attr-defined]
    except ValidationError as error:
        problems = _problems(error, options_class, json.loads(document)["options"])
    raise OptionsError([f"{'.'.join((where, *path))}: {message}" for path, message in problems.items()])


def shown(value: Any) -> str:
    """The value as YAML writes it, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def unknown_key(key: str, allowed: Sequence[str]) -> str:
    """Says that no field is called `key`, and which might be meant."""
    near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    return f"unknown key; allowed here: {', '.join(allowed)}" if allowed else "unknown key; none is allowed"


def _problems(error: ValidationError, options_class: type, values: Any) -> dict[tuple[str, ...], str]:
    """What is wrong, by path. The alternatives of a union are one problem."""
    findings: dict[tuple[str, ...], list[Any]] = {}
    for finding in error.errors(include_url=False):
        findings.setdefault(_path(finding, values), []).append(finding)
    problems = {}
    for path, found in findings.items():
        # A problem inside a value says more than that another alternative does not take the value.
        if any(inside[: len(path)] == path and inside != path for inside in findings):
            continue
        message = _message(found, path, options_class)
        name, colon, rest = message.partition(": ")
        if found[0]["type"] == "value_error" and colon and name.split(".")[0] in _fields(options_class, path):
            path, message = (*path, name), rest
        problems[path] = message
    return problems


def _path(finding: Any, values: Any) -> tuple[str, ...]:
    """Keys and indices that lead to the finding in `values`; the tags that unions add are left out."""
    path = []
    for part in finding["loc"][1:]:
        if (
            isinstance(values, Mapping)
            and part in values
            or isinstance(values, list)
            and part in range(len(values))
        ):
            values = values[part]
        elif finding["type"] != "missing" or part != finding["loc"][-1]:
            continue
        path.append(str(part))
    return tuple(path)


def _message(findings: Sequence[Any], path: tuple[str, ...], options_class: type) -> str:
    finding, kinds = findings[0], [finding["type"] for finding in findings]
    if all(kind in WANTED for kind in kinds):
        return (
            f"{shown(finding['input'])} is not {' or '.join(dict.fromkeys(WANTED[kind] for kind in kinds))}"
        )
    kind = kinds[0]
    if kind == "value_error":
        return str(finding["ctx"]["error"])
    if kind == "unexpected_keyword_argument":
        return unknown_key(path[-1], _fields(options_class, path[:-1]))
    if kind == "missing":
        return "missing; a value is required"
    if kind in {"literal_error", "enum"}:
        return f"{shown(finding['input'])} is not {finding['ctx']['expected']}"
    return f"{shown(finding['input'])}: {finding['msg']}"


def _fields(annotation: Any, path: tuple[str, ...]) -> list[str]:
    """Names of the fields of the dataclass that a value at `path` below `annotation` is read as."""
    if dataclasses.is_dataclass(annotation):
        if not path:
            return [field.name for field in dataclasses.fields(annotation) if field.init]
        return _fields(typing.get_type_hints(annotation).get(path[0]), path[1:])
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    inner = typing.get_args(annotation)
    return [name for part in inner for name in _fields(part, path if union else path[1:])]
