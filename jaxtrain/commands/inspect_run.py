"""`jaxtrain inspect DIRECTORY`: what a directory is, how far its run has come, and what is wrong with it."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxtrain.commands.common import FAILED, WRONG_CONFIG, console, fail


def inspect_run(
    directory: Annotated[
        Path, typer.Argument(help="runs/NAME; of another directory, what it is.", show_default=False)
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a run's directory holds: recipe, steps, checkpoints, who runs it, and what is wrong with it.

    Reads only. The exit status is 1 if something is wrong.
    """
    if not directory.is_dir():
        _absent(directory)
    found = look(directory)
    if json:
        print(json_module.dumps(found, indent=2))
    else:
        _show(found)
    if found["problems"]:
        raise typer.Exit(FAILED)


def _absent(directory: Path) -> None:
    from rollout_bridge.errors import guess

    beside = directory.parent
    known = [path.name for path in beside.iterdir() if path.is_dir()] if beside.is_dir() else []
    what = "a file, no directory" if directory.exists() else "no such directory"
    fail(f"{directory}: {what}{guess(directory.name, known)}", status=WRONG_CONFIG)


def look(directory: Path) -> dict[str, Any]:
    """What is in the directory: `is`, `facts` by label, `problems` and commands to go on with, as `next`."""
    from jaxtrain.config.load import SAVED

    if (directory / SAVED).is_file():
        return _run(directory)
    runs = sorted(path.parent.name for path in directory.glob(f"*/{SAVED}"))
    if runs:
        return _other(directory, f"a directory of runs: {', '.join(runs)}", f"inspect {directory / runs[-1]}")
    if (directory / "config.json").is_file():
        return _other(directory, "a model with its config.json", f"inspect model {directory}")
    if (directory / "run.json").is_file() or (directory / "weights").is_dir():
        return _other(directory, "a store", f"inspect weights {directory.resolve()}")
    names = sorted(path.name for path in directory.iterdir())[:8]
    problem = f"it has no {SAVED}, config.json or run.json, but {', '.join(names) or 'nothing'}"
    return {"is": f"{directory}: no run, model or store", "facts": {}, "problems": [problem], "next": []}


def _other(directory: Path, what: str, command: str) -> dict[str, Any]:
    return {"is": f"{directory}: {what}", "facts": {}, "problems": [], "next": [f"jaxtrain {command}"]}


def _run(directory: Path) -> dict[str, Any]:
    from jaxtrain.config.errors import ConfigError
    from jaxtrain.config.load import SAVED, ConfigReader, load_config
    from jaxtrain.config.run_lock import held_by_another
    from jaxtrain.quickstart.next_steps import next_steps
    from jaxtrain.quickstart.summary import metric_rows
    from jaxtrain.training.steps import saved_steps

    facts: dict[str, Any] = {}
    problems: list[str] = []
    found = {"is": f"{directory}: a run", "facts": facts, "problems": problems, "next": []}
    try:
        config = load_config(directory / SAVED, reader=ConfigReader.SAVED)
    except ConfigError as error:
        problems += error.problems
        return found
    found["is"] = f"{directory}: run {config.name!r} of recipe {config.recipe}"
    try:
        rows = metric_rows(directory)
    except ValueError as error:
        problems.append(str(error))
        rows = []
    done = {name: sum(row["phase"] == name for row in rows) for name in config.phases}
    steps = [f"{name} {done[name]} of {phase.steps}" for name, phase in config.phases.items()]
    holder = held_by_another(directory)
    facts["steps"] = ", ".join(steps)
    if rows:
        facts["last step"] = f"step {rows[-1]['step']}, {_ago(rows[-1]['time'])}"
    facts["runs"] = holder or "no: no process holds its lock"
    saved = saved_steps(directory / "checkpoints")
    facts["checkpoints"] = ", ".join(map(str, saved)) or "none"
    renamed = sorted(path.name for path in (directory / "checkpoints").glob("unused-*"))
    if renamed:
        facts["renamed checkpoints"] = ", ".join(renamed)
    complete = all(done[name] >= phase.steps for name, phase in config.phases.items())
    if rows and not saved and not holder:
        problems.append("steps were made and no checkpoint is there: a start begins with step 1 again")
    if not complete and not holder:
        if words := _last_words(directory / "logs" / "trainer.log"):
            facts["end of the log"] = words
        if saved and rows and saved[-1] < rows[-1]["step"]:
            facts["a start"] = f"goes on after step {saved[-1]}"
    store = getattr(config, "store_url", "")
    local = Path(store.removeprefix("file://"))
    if store and local.is_absolute():
        facts["store"] = str(local)
        if not local.is_dir():
            problems.append(f"{local}: the store of this run is not there")
    elif store:
        facts["store"] = store
    found["next"] = next_steps(config)
    return found


def _last_words(log: Path) -> str:
    """The last line of a log, "" without one."""
    if not log.is_file():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _ago(then: float) -> str:
    from jaxtrain.quickstart.view import clock

    return f"{clock(max(0.0, time.time() - then))} ago"


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    shown = console()
    print(found["is"])
    table = Table("", "", show_header=False)
    for label, value in found["facts"].items():
        table.add_row(label, str(value))
    if found["facts"]:
        shown.print(table)
    for problem in found["problems"]:
        print(f"problem: {problem}")
    for command in found["next"]:
        print(f"  {command}")
