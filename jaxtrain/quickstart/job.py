"""The main job: lock the run, start its processes, watch them, summarise it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from jaxtrain.config.resume import check_run, claim_run, unwritable
from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.quickstart.child import Child, ChildSpec
from jaxtrain.quickstart.compose import compose
from jaxtrain.quickstart.next_steps import ending
from jaxtrain.quickstart.progress import ProgressReader
from jaxtrain.quickstart.report import print_summary, write_report
from jaxtrain.quickstart.summary import finished
from jaxtrain.quickstart.supervisor import supervise
from jaxtrain.quickstart.takeover import owned
from jaxtrain.quickstart.timeline import recorded
from jaxtrain.quickstart.view import live_view
from rollout_bridge.control import read_state
from rollout_bridge.store import Store

Compose = Callable[[AsyncGrpoConfig, Path], list[ChildSpec]]

RESUME = "run the same command again: it resumes"
LOG_LINES = 15


def run(config: AsyncGrpoConfig, *, processes: Compose = compose, replace: bool = False) -> int:
    """Runs to the end. Returns the exit status: 0 finished, 1 failed, 128 + signal when stopped.

    replace: stop a quickstart of this run that is running.

    Raises `ConfigError` (the run was started with other settings), `StoreError`, `TakeoverError`.
    """
    console = Console(stderr=False)
    check_run(config)
    if config.store is not None:
        Store.open(config.store)  # a wrong store binds no run, and stops none
    run_dir = config.run_dir
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(run_dir, error) from error
    with owned(run_dir, stop_timeout_s=config.processes.stop_timeout_s, replace=replace) as stopped:
        claim_run(config)  # by its holder alone, as this may rename the store
        store = Store.open(config.store_url)
        if stopped:
            console.print(f"Stopped what an earlier invocation left running: {', '.join(stopped)}.")
        if finished(config, store):
            console.print(f"Run {config.name!r} is finished. Another one: --name NAME")
            print_summary(write_report(config, store), run_dir, console)
            print(ending(config))
            return 0
        if (state := read_state(store)) is not None and state.finished:
            store.put_json(state.key, state.to_json() | {"phase": "rl"})  # more steps: none may end
        console.print(
            f"Run {config.name!r} in {run_dir}; logs in {run_dir / 'logs'}. Ctrl-C stops it, to be resumed."
        )
        reader = ProgressReader(run_dir, config, since=time.time())
        with recorded(run_dir), live_view(reader.read, name=config.name, console=console) as tick:
            outcome = supervise(
                processes(config, run_dir),
                run_dir=run_dir,
                stop_timeout_s=config.processes.stop_timeout_s,
                on_tick=tick,
            )
        if outcome.interrupted is not None:
            console.print(f"Stopped by {outcome.interrupted.name}. To go on, {RESUME}.")
            return 128 + outcome.interrupted
        if outcome.failed is not None:
            print(describe_failure(outcome.failed), file=sys.stderr)
            return 1
        if not finished(config, store):
            print(
                f"trainer: left before the end of the run. Log: {run_dir / 'logs/trainer.log'}\n"
                f"To go on, {RESUME}.",
                file=sys.stderr,
            )
            return 1
        print_summary(write_report(config, store), run_dir, console)
        print(ending(config))
        return 0


def describe_failure(child: Child) -> str:
    """Process, how it ended, its log and the end of it, and the remedy."""
    lines = child.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    quoted = "".join(f"\n  | {text}" for text in lines)
    return (
        f"{child.name}: {child.describe_exit()}. Log: {child.log}{quoted}\n"
        f"The others were stopped. To go on, {RESUME}."
    )
