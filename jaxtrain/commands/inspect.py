"""`jaxtrain inspect`: an experiment's fields and values."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

from jaxtrain.commands.common import Check, ConfigPath, Name, Overrides, console, load


def inspect(
    config: ConfigPath,
    name: Name = None,
    check: Check = False,
    json: Annotated[bool, typer.Option("--json", help="Print the values as JSON.")] = False,
    overrides: Overrides = None,
) -> None:
    """Show every field of an experiment with its value and the reason for its default.

    Values that differ from the default are marked with *. Nothing is started.
    """
    experiment = load(config, name, overrides)
    if check:
        print(f"{config}: ok ({experiment.recipe}, run {experiment.name!r} in {experiment.run_dir})")
        return
    from pydantic_core import PydanticUndefined
    from rich.table import Column, Table

    from jaxtrain.config.base import Reference
    from jaxtrain.config.errors import dotted, section_of, walk_fields
    from jaxtrain.config.schema import as_plain

    table = Table(
        "",
        Column("field", no_wrap=True),
        "value",
        "reason for the default, or meaning",
        title=str(config),
        title_justify="left",
    )
    values = as_plain(experiment)
    if json:
        print(json_module.dumps(values, indent=2))
        return
    for path, field in walk_fields(type(experiment)):
        value = values
        for part in path:
            value = value[part]
        if section_of(field) is not None:
            continue
        if field.annotation is Reference:  # its options have no schema: those given, in their order
            for key in value:
                table.add_row("", dotted((*path, key)), str(value[key]), field.description or "")
            continue
        default = field.get_default(call_default_factory=True)
        changed = default is not PydanticUndefined and value != default
        table.add_row("*" if changed else "", dotted(path), str(value), field.description or "")
    console().print(table)
