"""Config values that name code (contract 8): the kinds, and how an instance is built.

Built-in classes are registered the same way as a user's: a name for `module:Name`, and options read into the
dataclass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.config.base import Reference, Section
from jaxtrain.config.errors import ConfigError, dotted, walk_fields
from rollout_bridge import references
from rollout_bridge.options import OptionsError, read

PLAN_COLUMNS = frozenset({"behavior_logprobs", "advantages", "temperature", "routed_experts"})  # of RL's data


@dataclass(frozen=True)
class ReferenceKind:
    """group: of entry points that register names. builtin: name -> `module:Name`. members: that instances
    have.
    """

    group: str
    builtin: Mapping[str, str]
    members: tuple[str, ...]


KINDS = {
    "loss": ReferenceKind(
        "jaxtrain.losses",
        {
            "next_token": "jaxtrain.losses.next_token:NextToken",
            "double_sided": "jaxtrain.losses.policies.double_sided:DoubleSided",
        },
        ("columns", "__call__"),
    ),
    "advantage": ReferenceKind(
        "jaxtrain.advantages",
        {"group_mean": "jaxtrain.rl.advantages.group_mean:GroupMean"},
        ("of_group", "of_tokens"),
    ),
    "filter": ReferenceKind(
        "jaxtrain.filters", {"no_signal": "jaxtrain.rl.filters.no_signal:NoSignal"}, ("reason", "keep")
    ),
    "source": ReferenceKind(
        "jaxtrain.sources",
        {
            "conversations": "jaxtrain.data.sources.conversations:Conversations",
            "mixture": "jaxtrain.data.sources.mixture:Mixture",
            "text": "jaxtrain.data.sources.text:Text",
            "worked_answers": "jaxtrain.data.sources.worked_answers:WorkedAnswers",
        },
        ("columns", "open"),
    ),
}


def build(kind: str, reference: Reference, *, where: str) -> Any:
    """An instance of the class that `reference` names, with its options.

    where: the field, for errors. Raises `ConfigError` for a name that is unknown or options that do not fit.
    """
    of_kind = KINDS[kind]
    try:
        named = references.resolve(reference.name, group=of_kind.group, builtin=of_kind.builtin, kind=kind)
        built: Any = read(named, reference.options, where=where)  # type: ignore[arg-type]
    except references.UnknownReference as error:
        raise ConfigError([f"{where}.name: {error}"]) from error
    except OptionsError as error:
        raise ConfigError(error.problems) from error
    except TypeError as error:
        raise ConfigError([f"{where}.name: {error}"]) from error
    if missing := [name for name in of_kind.members if not hasattr(built, name)]:
        raise ConfigError(
            [f"{where}.name: {reference.name!r} has no {', '.join(missing)}, which every {kind} needs"]
        )
    return built


def check(config: Section) -> None:
    """Builds what the config names by reference, fields at their defaults left out.

    Raises `ConfigError` with every problem; among them, a loss that reads a column which its data lacks.
    """
    problems: list[str] = []
    found = {where: (kind, reference, default) for where, kind, reference, default in references_of(config)}
    for where, (kind, reference, default) in found.items():
        beside = f"{where.rpartition('.')[0]}.source"
        of_source = found.get(beside) if kind == "loss" else None
        if default and (of_source is None or of_source[1].name in KINDS["source"].builtin):
            continue  # options of a source of ours change no column: nothing of a default loss to check
        try:
            built = build(kind, reference, where=where)
            if kind == "loss":
                filled = PLAN_COLUMNS
                if of_source is not None:
                    filled = build("source", of_source[1], where=beside).columns
                check_columns(built.columns, filled, where=where)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))  # a source is built for the loss beside it too


def check_columns(columns: Sequence[Any], filled: Collection[str], *, where: str) -> None:
    """Raises `ConfigError` for columns of the loss at `where` that the data, which has `filled`, lacks."""
    missing = [column.name for column in columns if column.name not in filled]
    if missing:
        raise ConfigError(
            [
                f"{where}: reads {', '.join(missing)}, which this phase's data does not have (it has "
                f"{', '.join(sorted(filled)) or 'no further columns'}); name another loss"
            ]
        )


def references_of(config: Section) -> Iterator[tuple[str, str, Reference, bool]]:
    """(field, kind, reference, whether it is the default) of each field that names code of `KINDS`."""
    for path, field in walk_fields(type(config)):
        extra = field.json_schema_extra
        kind = extra.get("reference") if isinstance(extra, dict) else None
        if kind not in KINDS:
            continue
        value: Any = config
        for part in path:
            value = getattr(value, part)
        default = value == field.get_default()
        values = value if isinstance(value, list) else [] if value is None else [value]
        for index, one in enumerate(values):
            where = dotted((*path, str(index)) if isinstance(value, list) else path)
            yield where, str(kind), one, default
