"""`jaxtrain report`: the summary of a run, finished or running."""

from __future__ import annotations

from pathlib import Path

from jaxtrain.commands.common import ConfigPath, Name, Overrides, fail, load_async, naming


def report(
    config: ConfigPath = Path("configs/quickstart.yaml"), name: Name = None, overrides: Overrides = None
) -> None:
    """Sum a run up from its store and metrics: summary.json, curves.png, and a table.

    Works while the run goes on; it only reads.
    """
    experiment = load_async(config, name, overrides)
    from rich.console import Console

    from jaxtrain.quickstart.report import print_summary, write_report
    from rollout_bridge.store import Store, StoreError

    if not experiment.run_dir.is_dir():
        fail(f"{experiment.run_dir}: no such run. Start it with jaxtrain quickstart, or give another --name")
    with naming(StoreError):
        print_summary(
            write_report(experiment, Store.open(experiment.store_url, probe=False)),
            experiment.run_dir,
            Console(),
        )
