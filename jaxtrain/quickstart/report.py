"""Writes summary.json and curves.png, and prints the summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.quickstart.curves import CURVES, draw
from jaxtrain.quickstart.summary import metric_rows, summarize
from jaxtrain.quickstart.view import clock, kilobytes
from rollout_bridge.files import write_whole
from rollout_bridge.store import Store

SUMMARY = "summary.json"


def write_report(config: AsyncGrpoConfig, store: Store) -> dict[str, Any]:
    """runs/<name>/summary.json and curves.png, replaced whole. Returns the summary."""
    summary = summarize(config, store)
    write_whole(config.run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")
    draw(metric_rows(config.run_dir), config.run_dir / CURVES, title=config.name)
    return summary


def print_summary(summary: dict[str, Any], run_dir: Path, console: Console) -> None:
    """A table of the main values, and the files with all of them."""
    table = Table("", "", title=f"Run {summary['name']}", title_justify="left", show_header=False)
    for label, value in summary_lines(summary):
        table.add_row(label, value)
    console.print(table)
    console.print(f"{run_dir / SUMMARY}\n{run_dir / CURVES}\ntensorboard --logdir {run_dir / 'tensorboard'}")


def summary_lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, value) of each row: learning, weight transfer, trajectories, speed."""
    counts = summary["trajectories"]
    dropped = ", ".join(f"{number} {reason}" for reason, number in counts["dropped"].items()) or "none"
    exact = summary["exact"]
    return [
        ("engine", summary["engine"]),
        (
            "held-out, greedy",
            f"exact {_number(exact['greedy_before'])} -> {_number(exact['greedy_after'])}, reward "
            f"{_number(summary['reward_before'])} -> {_number(summary['reward_after'])}, "
            f"{_number(summary['truncated_after'])} cut off after",
        ),
        ("versions published", str(summary["versions_published"])),
        (
            "lag in optimizer steps",
            f"mean {_number(summary['lag_mean'])}, max {_number(summary['lag_max'], '.0f')}",
        ),
        (
            "trajectories",
            f"{counts['written']} written = {counts['trained']} trained + {counts['pending']} pending "
            f"+ dropped ({dropped})",
        ),
        (
            "delta",
            f"{_bytes(summary['delta_bytes_mean'])} mean, {_number(summary['delta_to_reference'])}x its "
            f"order-0 entropy, {_number(summary['delta_ratio'], '.0f')}x smaller than BF16 "
            f"({_bytes(summary['full_bytes_bf16'])})",
        ),
        ("update RMS", _number(summary["update_rms_mean"], ".2e")),
        ("pause of an update", f"{_number(summary['update_pause_ms_p50'], '.0f')} ms median"),
        ("tensors verified", f"{summary['tensors_verified']:,}"),
        (
            "tokens/s",
            f"{_number(summary['train_tokens_per_s'], ',.0f')} trained, "
            f"{_number(summary['generate_tokens_per_s'], ',.0f')} generated",
        ),
        ("restarts", str(summary["restarts"])),
        ("time", clock(summary["seconds"]) if summary["seconds"] is not None else "-"),
    ]


def _number(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else format(value, form)


def _bytes(value: float | None) -> str:
    return "-" if value is None else kilobytes(value)
