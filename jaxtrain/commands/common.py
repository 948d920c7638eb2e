"""Shared by the commands: options, log format, and how errors are printed."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from rollout_bridge.errors import ExpectedError

if TYPE_CHECKING:
    from rich.console import Console

    from jaxtrain.config.schema import AsyncGrpoConfig, ExperimentConfig

UNLIMITED = 1 << 14  # columns; a table takes only what it needs
WRONG_CONFIG = 2  # exit status: nothing was started
FAILED = 1
STOPPED = 130  # by Ctrl-C or SIGTERM, with everything saved

ConfigPath = Annotated[
    Path, typer.Option("--config", "-c", help="The experiment, a YAML file. See configs/.", show_default=True)
]
Name = Annotated[
    str | None,
    typer.Option(
        "--name", "-n", help="Name of the run; its directory is runs/NAME. (default: the one in the config)"
    ),
]
Check = Annotated[bool, typer.Option("--check", help="Only check the config, then stop.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FIELD=VALUE",
        help="Fields to change, e.g. rl.steps=30 rollouts.engine=vllm.",
        show_default=False,
    ),
]


def load(
    path: Path, name: str | None, overrides: list[str] | None, *, fleet: bool = False
) -> ExperimentConfig:
    """The checked config, or its problems on stderr and exit status 2.

    fleet: for a host without weights and tokenizer, see `of_a_fleet`.
    """
    from jaxtrain.config.errors import ConfigError
    from jaxtrain.config.load import ConfigReader, load_config

    given = [*(overrides or []), *([f"name={name}"] if name is not None else [])]
    try:
        return load_config(path, given, reader=ConfigReader.FLEET if fleet else ConfigReader.TRAINER)
    except ConfigError as error:
        fail(str(error), status=WRONG_CONFIG)


def load_async(
    path: Path, name: str | None, overrides: list[str] | None, *, fleet: bool = False
) -> AsyncGrpoConfig:
    """As `load`, for the commands that only a run with a fleet has."""
    from jaxtrain.config.schema import AsyncGrpoConfig

    config = load(path, name, overrides, fleet=fleet)
    if not isinstance(config, AsyncGrpoConfig):
        fail(
            f"{path}: recipe: {config.recipe!r} has no rollouts; this command needs async_grpo",
            status=WRONG_CONFIG,
        )
    return config


def fail(message: str, *, status: int = FAILED) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    raise typer.Exit(status)


@contextmanager
def naming(*others: type[Exception]) -> Iterator[None]:
    """An expected error ends the command with only its message; other errors keep their traceback.

    others: expected errors of a package without `ExpectedError`.
    """
    try:
        yield
    except (ExpectedError, *others) as error:
        fail(f"{type(error).__name__}: {error}")


def console() -> Console:
    """For standard output. Where nobody looks, in a file or a pipe, no line is cut or wrapped."""
    from rich.console import Console

    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=UNLIMITED if wide else None)


def log_to_stderr() -> None:
    """One line an event, with time, level and module."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    for chatty in ("absl", "jax"):  # checkpointing logs a dozen lines a save
        logging.getLogger(chatty).setLevel(logging.WARNING)
