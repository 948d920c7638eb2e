"""YAML file and dotted overrides -> a checked experiment. Imports neither jax nor transformers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from jaxtrain.config.checkpoint import of_a_fleet
from jaxtrain.config.errors import ConfigError, dotted, explain
from jaxtrain.config.schema import RECIPES, ExperimentConfig
from rollout_bridge.references import UnknownReference, resolve, search_path

COMMAND_LINE = "command line"
SAVED = "config.yaml"  # of a run, in its directory


class ConfigReader(Enum):
    """Which program reads a config, and which directories it opens.

    TRAINER: those of weights and tokenizer.
    FLEET: neither; run.json of the store has the model.
    SAVED: a config that a run has written, with every field; not the one of the weights.
    """

    TRAINER = auto()
    FLEET = auto()
    SAVED = auto()


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers (1e-4 is a number), and a repeated key is an error rather than the last one wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        given = [(key, value) for key, value in node.value if key.tag != _MERGE]
        keys = [self.construct_object(key, deep=True) for key, _ in given]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", given[i][0].start_mark
                )
        return super().construct_mapping(node, deep)


_MERGE = "tag:yaml.org,2002:merge"  # `<<: *base`, which the core schema has not
# The core schema of YAML 1.2 (section 10.3.2): yes, no, on and off are text, and 0o17 is octal, not 017.
_CORE = {
    "null": (r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    "merge": (r"<<", ["<"]),
}
_Loader.yaml_implicit_resolvers = {}
for _name, (_pattern, _first) in _CORE.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _first)


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Decimal with leading zeros, 0o octal, 0x hexadecimal."""
    text = str(loader.construct_scalar(node))
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text.removeprefix("0o") if base == 8 else text, base)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


class _Dumper(yaml.SafeDumper):
    """Quotes text that a reader of YAML 1.1 or 1.2 would take for something else."""


_Dumper.yaml_implicit_resolvers = {
    first: [
        *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
        *_Loader.yaml_implicit_resolvers.get(first, []),
    ]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}


def as_yaml(values: Mapping[str, Any]) -> str:
    """Text that `load_config` reads as the same values."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False)


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, reader: ConfigReader = ConfigReader.TRAINER
) -> ExperimentConfig:
    """Read, override and check an experiment.

    overrides: `dotted.field=value`, the value in YAML (`rl.steps=30`, `store=null`); the last one wins.
    reader: decides which directories of the config are opened.
    Raises `ConfigError` with every problem found, each as `<file or command line>: <field>: <problem>`.
    """
    values = _read(Path(path))
    touched: list[tuple[str, ...]] = []
    for override in overrides:
        field, value = parse_override(override)
        if field[0] not in values:
            touched.append(field[:1])  # the section itself is not in the file
        _assign(values, field, value, override)
        touched.append(field)

    def origin(field: tuple[str | int, ...]) -> str:
        return COMMAND_LINE if any(field[: len(given)] == given for given in touched) else str(path)

    if _names_module(values):
        values["modules"] = str(Path(values.get("modules") or Path(path).parent).absolute())
        search_path(Path(values["modules"]))
    if reader is ConfigReader.FLEET:
        values = of_a_fleet(values)
    known = reader is ConfigReader.SAVED or _remember(values)
    return _validate(values, origin, weights_known=known, stand_in=reader is ConfigReader.FLEET)


def _remember(values: dict[str, Any]) -> bool:
    """Fills a model section with `checkpoint` from the config that its run has saved, if there is one.

    Returns whether there is. A run that has begun does not need the directory of the weights.
    """
    model, runs_dir = values.get("model"), values.get("runs_dir", "runs")
    if not isinstance(model, dict) or model.get("checkpoint") is None or not isinstance(runs_dir, str):
        return False
    saved = Path(runs_dir) / str(values.get("name", "run")) / SAVED
    if not saved.is_file():
        return False
    known = _read(saved).get("model")
    if not isinstance(known, dict) or known.get("checkpoint") != model["checkpoint"]:
        return False
    values["model"] = known | {name: value for name, value in model.items() if value is not None}
    return True


def _validate(
    values: dict[str, Any], origin: Any, *, weights_known: bool, stand_in: bool
) -> ExperimentConfig:
    """weights_known, stand_in: whether every field of the model is given, and whether they may be made up."""
    model = _recipe(values.get("recipe"), origin)
    try:
        return model.model_validate(values, context={"weights_known": weights_known, "stand_in": stand_in})
    except ValidationError as error:
        problems = [
            f"{origin(field)}: {dotted(field)}: {message}"
            for field, message in explain(error, model, others=RECIPES)
        ]
        raise ConfigError(problems) from None


def _recipe(name: Any, origin: Any) -> type[ExperimentConfig]:
    """The class that `recipe` names."""
    where = f"{origin(('recipe',))}: recipe: "
    if not isinstance(name, str):
        problem = "missing" if name is None else f"{name!r} is not text"
        raise ConfigError([f"{where}{problem}; one of {', '.join(RECIPES)}, or module:Name of your own"])
    builtin = {known: f"{kind.__module__}:{kind.__name__}" for known, kind in RECIPES.items()}
    try:
        found = resolve(name, group="jaxtrain.recipes", builtin=builtin, kind="recipe")
    except UnknownReference as error:
        raise ConfigError([f"{where}{error}"]) from error
    if not (isinstance(found, type) and issubclass(found, ExperimentConfig)):
        raise ConfigError([f"{where}{name!r} is {found!r}, not a subclass of ExperimentConfig"])
    return found


_MODULE_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def _names_module(value: Any) -> bool:
    """Whether some text in it is `module:Name`."""
    if isinstance(value, dict | list):
        return any(map(_names_module, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and _MODULE_NAME.fullmatch(value) is not None


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """`rl.steps=30` -> (("rl", "steps"), 30). Raises `ConfigError`."""
    key, separator, value = text.partition("=")
    parts = tuple(key.strip().split("."))
    if not separator or not all(parts):
        raise ConfigError(
            [f"{COMMAND_LINE}: {text!r} is not an override; write field=value, e.g. rl.steps=30"]
        )
    try:
        return parts, yaml.load(value, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(
            [f"{COMMAND_LINE}: {dotted(parts)}: {value!r} is not YAML ({_cause(error)})"]
        ) from None


def blamed(problem: str, path: Path, overrides: Sequence[str]) -> str:
    """`<file or command line>: <problem>`, for a problem `<field>: ...` found after `load_config`."""
    field = (*problem.partition(":")[0].split("."),)
    given = [parse_override(override)[0] for override in overrides]
    ours = any(field[: len(each)] == each[: len(field)] for each in given)
    return f"{COMMAND_LINE if ours else path}: {problem}"


def _assign(values: dict[str, Any], field: tuple[str, ...], value: Any, override: str) -> None:
    for depth, part in enumerate(field[:-1]):
        inner = values.setdefault(part, {})
        if inner is None:
            inner = values[part] = {}
        if not isinstance(inner, dict):
            raise ConfigError(
                [f"{COMMAND_LINE}: {override}: {dotted(field[: depth + 1])} is {inner!r}, not a section"]
            )
        values = inner
    values[field[-1]] = value


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file{_nearby(path)}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: not YAML: {_cause(error)}"]) from None
    if not isinstance(values, dict):
        raise ConfigError([f"{path}: holds {type(values).__name__}, not a mapping of fields to values"])
    return values


def _nearby(path: Path) -> str:
    here = path.parent if path.parent.is_dir() else Path("configs")
    known = sorted(here.glob("*.yaml")) if here.is_dir() else []
    near = difflib.get_close_matches(path.name, [file.name for file in known], n=1)
    if near:
        return f"; did you mean {here / near[0]}?"
    return f"; there are {', '.join(map(str, known))}" if known else ""


def _cause(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return str(error)
