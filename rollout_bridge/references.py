"""A config value that names code: a registered name, or `module:Name` of a user's own file."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

from rollout_bridge.errors import ExpectedError, guess

INHERITED = "JAXTRAIN_SEARCH_PATH"  # environment variable: directories that child processes search too
_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class UnknownReference(ExpectedError, ValueError):
    """A value that names no code; says what was found, what is known and where modules are looked for."""


def search_path(directory: Path) -> None:
    """Modules in `directory`, that of the config file, can be imported in this process and its children.

    It comes last on `sys.path`: a file there never hides a module of Python or of an installed package.
    """
    entry = str(directory.resolve())
    inherited = _inherited()
    if entry not in inherited:
        os.environ[INHERITED] = os.pathsep.join([*inherited, entry])
    _append([entry])


def _inherited() -> list[str]:
    return [entry for entry in os.environ.get(INHERITED, "").split(os.pathsep) if entry]


def _append(entries: list[str]) -> None:
    new = [entry for entry in entries if entry not in sys.path]
    sys.path += new
    if new:
        importlib.invalidate_caches()


def known(*, group: str, builtin: Mapping[str, str]) -> dict[str, str]:
    """Every registered name, with its `module:Name`: those of `builtin`, then the entry points of `group`."""
    return {entry.name: entry.value for entry in entry_points(group=group)} | dict(builtin)


def resolve(reference: str, *, group: str, builtin: Mapping[str, str], kind: str) -> object:
    """The object that `reference` names.

    reference: a name of `builtin` (name -> `module:Name`), a name that an installed package registers as an
    entry point of `group`, or `module:Name` itself. kind: what is named, for errors, such as "environment".
    Raises `UnknownReference`.
    """
    target = builtin.get(reference, reference)
    names = {} if _REFERENCE.fullmatch(target) else known(group=group, builtin=builtin)
    target = names.get(target, target)
    if not _REFERENCE.fullmatch(target):
        raise UnknownReference(
            f"{kind} {reference!r} is unknown{guess(reference, names) or '.'} Known: "
            f"{', '.join(sorted(names)) or 'none'}. Write one of your own "
            "as module:Name, where the module is a file beside the config file or is installed"
        )
    _append(_inherited())
    what = f"{kind} {reference!r}" + ("" if target == reference else f" ({target})")
    module_name, _, name = target.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        problem = "there is no such module" if absent else f"it raises {type(error).__name__}: {error}"
        raise UnknownReference(
            f"{what}: cannot import {module_name}: {problem}. Searched: {', '.join(sys.path)}"
        ) from error
    where = getattr(found, "__file__", None) or module_name
    for part in name.split("."):
        if not hasattr(found, part):
            raise UnknownReference(f"{what}: {where} has no {part!r}{guess(part, dir(found))}")
        found = getattr(found, part)
    return found
