"""`jaxtrain report`: the summary of a run, finished or running."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from jaxtrain.commands.common import ConfigPath, Name, Overrides, console, fail, load, load_async, naming


def report(
    config: ConfigPath = Path("configs/quickstart.yaml"),
    name: Name = None,
    noise_scale: Annotated[
        bool,
        typer.Option(
            "--noise-scale",
            help="Plot the gradient noise scale against the batch size instead, of a run whose phase has "
            "measure_noise.",
        ),
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Summarise a run from its store and metrics: summary.json, curves.png, and a table.

    Works while the run goes on; it only reads.
    """
    if noise_scale:
        plot_noise_scale(config, name, overrides)
        return
    experiment = load_async(config, name, overrides)
    from jaxtrain.quickstart.report import print_summary, write_report
    from rollout_bridge.control import read_state
    from rollout_bridge.store import Store
    from rollout_bridge.weights.format.run import load as load_run

    if not experiment.run_dir.is_dir():
        _absent(experiment.run_dir, "quickstart")
    local = experiment.store_url.removeprefix("file://")
    if os.path.isabs(local) and not os.path.isdir(local):
        fail(f"{experiment.store_url}: the store of {experiment.run_dir} is not there; nothing was written")
    with naming():
        store = Store.open(experiment.store_url, probe=False)
        if load_run(store) is None and read_state(store) is None:
            fail(f"{experiment.store_url}: holds no run; nothing was written. See that store: is the run's")
        print_summary(write_report(experiment, store), experiment.run_dir, console())


def plot_noise_scale(config: Path, name: str | None, overrides: list[str] | None) -> None:
    """runs/<name>/noise_scale.png."""
    experiment = load(config, name, overrides)
    from jaxtrain.training.noise_plot import write_noise_plot

    if not experiment.run_dir.is_dir():
        _absent(experiment.run_dir, "train")
    with naming(ValueError):
        print(write_noise_plot(experiment.run_dir, title=experiment.name))


def _absent(run_dir: Path, command: str) -> NoReturn:
    from rollout_bridge.errors import guess

    known = [path.name for path in run_dir.parent.glob("*") if path.is_dir()]
    near = guess(run_dir.name, known) or "."
    fail(f"{run_dir}: no such run{near} Start it with jaxtrain {command}, or give another --name")
