"""`jaxtrain report`: the summary of a run, finished or running."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxtrain.commands.common import ConfigPath, Name, Overrides, fail, load, load_async, naming


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
    from rich.console import Console

    from jaxtrain.quickstart.report import print_summary, write_report
    from rollout_bridge.store import Store

    if not experiment.run_dir.is_dir():
        fail(f"{experiment.run_dir}: no such run. Start it with jaxtrain quickstart, or give another --name")
    with naming():
        print_summary(
            write_report(experiment, Store.open(experiment.store_url, probe=False)),
            experiment.run_dir,
            Console(),
        )


def plot_noise_scale(config: Path, name: str | None, overrides: list[str] | None) -> None:
    """runs/<name>/noise_scale.png."""
    experiment = load(config, name, overrides)
    from jaxtrain.training.noise_plot import write_noise_plot

    if not experiment.run_dir.is_dir():
        fail(f"{experiment.run_dir}: no such run. Start it with jaxtrain train, or give another --name")
    with naming(ValueError):
        print(write_noise_plot(experiment.run_dir, title=experiment.name))
