"""The config a run was started with, and what may change when the run is started again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from jaxtrain.config import run_lock
from jaxtrain.config.errors import ConfigError, dotted, section_of, walk_fields
from jaxtrain.config.load import SAVED, ConfigReader, as_yaml, load_config
from jaxtrain.config.schema import ExperimentConfig, as_plain
from rollout_bridge.files import write_whole


def has_begun(run_dir: Path) -> bool:
    """Whether a step or a checkpoint of the run is recorded."""
    metrics, checkpoints = run_dir / "metrics.jsonl", run_dir / "checkpoints"
    stepped = metrics.is_file() and metrics.stat().st_size > 0
    return stepped or (checkpoints.is_dir() and any(each.name.isdecimal() for each in checkpoints.iterdir()))


def check_run(config: ExperimentConfig) -> None:
    """Raises `ConfigError` naming every field that differs from the saved config, except resumable ones.

    A run that has not begun may be started with any settings.
    """
    run_dir = config.run_dir
    saved_path = run_dir / SAVED
    if saved_path.exists() and has_begun(run_dir):
        changes = differences(load_config(saved_path, reader=ConfigReader.SAVED), config)
        if changes:
            raise ConfigError(
                [
                    f"{saved_path}: {field}: the run was started with {old!r}, now {new!r}"
                    for field, old, new in changes
                ]
                + [
                    f"Run {config.name!r} keeps the settings it was started with. Give the new ones another "
                    f"name (--name), or delete {run_dir} to start over."
                ]
            )


def claim_run(config: ExperimentConfig) -> Path:
    """Saves the config in runs/<name>/ and returns that directory; resumable fields take their new values.

    What a start with other settings left that took no step is renamed: its tokenizer and its own store.

    Raises `ConfigError` as `check_run` does, where another process runs it with other settings, and where the
    directory cannot be written.
    """
    check_run(config)
    run_dir = config.run_dir
    text = as_yaml(as_plain(config))
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        saved = run_dir / SAVED
        if saved.exists() and not has_begun(run_dir) and saved.read_text(encoding="utf-8") != text:
            if other := run_lock.held_by_another(run_dir):
                raise ConfigError(
                    [
                        f"{run_dir}: {other} runs this already, with other settings. Stop it first, or give "
                        "this run another name (--name)"
                    ]
                )
            for name in ("store", "tokenizer"):
                if (run_dir / name).exists():
                    (run_dir / name).rename(run_dir / f"unused-{name}-{time.time_ns()}")
        write_whole(saved, text)
    except OSError as error:
        raise unwritable(run_dir, error) from error
    return run_dir


def unwritable(run_dir: Path, error: OSError) -> ConfigError:
    """That the run's directory cannot be made or written."""
    return ConfigError(
        [f"runs_dir: {run_dir} cannot be written ({error.strerror or error}); name another directory"]
    )


def differences(saved: ExperimentConfig, given: ExperimentConfig) -> list[tuple[str, Any, Any]]:
    """(field, saved value, given value) of each field that differs and must not."""
    if type(saved) is not type(given):
        return [("recipe", saved.recipe, given.recipe)]
    old, new = as_plain(saved), as_plain(given)
    found = []
    for path, field in walk_fields(type(given)):
        before, after = _at(old, path), _at(new, path)
        extra = field.json_schema_extra
        resumable = isinstance(extra, dict) and bool(extra.get("resumable"))
        if before != after and not resumable and section_of(field) is None and path != ("model", "preset"):
            found.append((dotted(path), before, after))
    return found


def _at(values: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = values
    for part in path:
        value = value[part]
    return value
