"""Turns pydantic's errors into lines with where, what was found, and what is allowed."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jaxtrain.config.base import Reference, Section
from rollout_bridge.options import WANTED, OptionsError, shown, unknown_key

Path = tuple[str | int, ...]


class ConfigError(OptionsError):
    """A config that cannot be used. `problems` holds one line for each problem, all found at once."""


def dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def explain(
    error: ValidationError, model: type[Section], *, others: Mapping[str, type[Section]]
) -> Iterator[tuple[Path, str]]:
    """(field, message) of each finding, once a field. `others`: recipes a stray key may belong to."""
    seen: set[Path] = set()
    for finding in error.errors(include_url=False):
        path, field = _resolve(model, finding["loc"])
        context = finding.get("ctx", {})
        if finding["type"] == "cross_field":
            path = path + tuple(context["field"].split("."))
        if path not in seen:
            seen.add(path)
            yield path, _message(finding, path, field, model, others)


def _message(
    finding: Mapping[str, Any],
    path: Path,
    field: FieldInfo | None,
    model: type[Section],
    others: Mapping[str, type[Section]],
) -> str:
    kind, value, context = finding["type"], finding["input"], finding.get("ctx", {})
    if kind in {"cross_field", "own_words"}:
        return context["message"]
    if kind == "extra_forbidden":
        return _unknown_key(path, value, model, others)
    if kind == "missing":
        meaning = f" ({field.description})" if field is not None and field.description else ""
        return f"missing; a value is required{meaning}"
    if kind == "literal_error" and field is not None:
        plain = typing.get_origin(field.annotation) is typing.Literal
        allowed = ", ".join(map(str, typing.get_args(field.annotation))) if plain else context["expected"]
        return f"{shown(value)} is not one of {allowed}"
    if kind == "string_pattern_mismatch":
        return f"{shown(value)} does not match {context['pattern']}"
    if field is not None and kind in {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}:
        return f"{shown(value)} is not in {_interval(field)}"
    wanted = WANTED.get(kind)
    if wanted is None:
        return f"{shown(value)}: {finding['msg']}"
    if kind in {"int_type", "float_type"} and field is not None and _interval(field) != "(-inf, inf)":
        wanted += f" in {_interval(field)}"
    return f"{shown(value)} is not {wanted}"


def _interval(field: FieldInfo) -> str:
    """The interval that a number field's bounds leave, in mathematical notation."""
    low, high = "(-inf", "inf)"
    for bound in _bounds(field):
        match bound:
            case annotated_types.Ge(ge=value):
                low = f"[{value}"
            case annotated_types.Gt(gt=value):
                low = f"({value}"
            case annotated_types.Le(le=value):
                high = f"{value}]"
            case annotated_types.Lt(lt=value):
                high = f"{value})"
    return f"{low}, {high}"


def _bounds(field: FieldInfo) -> Iterator[Any]:
    """Bounds on the field itself, and those nested in an optional annotation."""
    yield from field.metadata
    for part in typing.get_args(field.annotation):
        for extra in getattr(part, "__metadata__", ()):
            yield from getattr(extra, "metadata", [extra])


_KEYED = (dict, list, Reference)


def _resolve(model: type[Section], loc: Path) -> tuple[Path, FieldInfo | None]:
    """Follow a pydantic location through sections; tags that pydantic adds for unions are left out."""
    path: list[str | int] = []
    field: FieldInfo | None = None
    current: type[Section] | None = model
    for part in loc:
        if current is None:
            current = element_of(field) if field is not None and isinstance(part, int) else None
            if current is not None:
                path.append(part)
                continue
            # Inside a plain dict or list: one key or index, then only union tags.
            if field is not None and (typing.get_origin(field.annotation) or field.annotation) in _KEYED:
                path.append(part)
            break
        path.append(part)
        field = current.model_fields.get(str(part))
        current = section_of(field) if field is not None else None
        if field is None:
            break
    return tuple(path), field


def _unknown_key(path: Path, value: Any, model: type[Section], others: Mapping[str, type[Section]]) -> str:
    parent: type[Section] = model
    for part in path[:-1]:
        if isinstance(part, str):
            field = parent.model_fields[part]
            parent = section_of(field) or element_of(field) or parent
    key, allowed = str(path[-1]), list(parent.model_fields)
    readers = [name for name, other in others.items() if parent is model and key in other.model_fields]
    if readers:
        return f"unknown key; only recipe {' or '.join(readers)} reads it"
    section = isinstance(value, dict)  # so is what may be meant
    elsewhere = [
        dotted(known)
        for known, field in walk_fields(model)
        if known[-1] == key and section == (section_of(field) is not None)
    ]
    if elsewhere and not difflib.get_close_matches(key, allowed, n=1):
        return f"unknown key here; it is {' or '.join(elsewhere)}"
    return unknown_key(key, allowed)


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section a field holds, None if it holds a value."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def element_of(field: FieldInfo) -> type[Section] | None:
    """The section that a list holds, None if the field holds something else."""
    if typing.get_origin(field.annotation) is not list:
        return None
    (element,) = typing.get_args(field.annotation)
    return element if isinstance(element, type) and issubclass(element, Section) else None


def walk_fields(
    model: type[Section], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every field of a section and of the sections in it, depth first, with its path."""
    for name, field in model.model_fields.items():
        yield (*prefix, name), field
        inner = section_of(field)
        if inner is not None:
            yield from walk_fields(inner, (*prefix, name))
