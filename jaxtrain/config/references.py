"""Config values that name code (contract 8): the kinds, and how an instance is built.

Built-in classes are registered the same way as a user's: a name for `module:Name`, and options read into the
dataclass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.config.base import Reference, Section
from jaxtrain.config.errors import ConfigError, dotted, walk_fields
from rollout_bridge import references
from rollout_bridge.options import OptionsError, read


@dataclass(frozen=True)
class ReferenceKind:
    """group: of entry points that register names. builtin: name -> `module:Name`."""

    group: str
    builtin: Mapping[str, str]


KINDS = {
    "loss": ReferenceKind(
        "jaxtrain.losses",
        {
            "next_token": "jaxtrain.losses.next_token:NextToken",
            "double_sided": "jaxtrain.losses.policies.double_sided:DoubleSided",
        },
    ),
    "advantage": ReferenceKind(
        "jaxtrain.advantages", {"group_mean": "jaxtrain.rl.advantages.group_mean:GroupMean"}
    ),
    "filter": ReferenceKind("jaxtrain.filters", {"no_signal": "jaxtrain.rl.filters.no_signal:NoSignal"}),
    "source": ReferenceKind(
        "jaxtrain.sources", {"worked_answers": "jaxtrain.data.sources.worked_answers:WorkedAnswers"}
    ),
}


def build(kind: str, reference: Reference, *, where: str) -> Any:
    """An instance of the class that `reference` names, with its options.

    where: the field, for errors. Raises `ConfigError` for a name that is unknown or options that do not fit.
    """
    of_kind = KINDS[kind]
    try:
        named = references.resolve(reference.name, group=of_kind.group, builtin=of_kind.builtin, kind=kind)
        return read(named, reference.options, where=where)  # type: ignore[arg-type]
    except references.UnknownReference as error:
        raise ConfigError([f"{where}.name: {error}"]) from error
    except OptionsError as error:
        raise ConfigError(error.problems) from error
    except TypeError as error:
        raise ConfigError([f"{where}.name: {error}"]) from error


def check(config: Section) -> None:
    """Builds everything that the config names by reference. Raises `ConfigError` with every problem."""
    problems: list[str] = []
    for where, kind, reference in references_of(config):
        try:
            build(kind, reference, where=where)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def references_of(config: Section) -> Iterator[tuple[str, str, Reference]]:
    """(field, kind, reference) of each field that names code of a kind of `KINDS`."""
    for path, field in walk_fields(type(config)):
        extra = field.json_schema_extra
        kind = extra.get("reference") if isinstance(extra, dict) else None
        if kind not in KINDS:
            continue
        value: Any = config
        for part in path:
            value = getattr(value, part)
        values = value if isinstance(value, list) else [value]
        for index, one in enumerate(values):
            yield dotted((*path, str(index)) if isinstance(value, list) else path), str(kind), one
