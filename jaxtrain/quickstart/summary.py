"""The summary of a run, computed only from its store and its metrics.

Where each number is from:
    reward_*, exact, truncated_*    evaluations/*/result.json at the lowest and the highest version evaluated
    versions_published              weights/latest
    delta_*, full_bytes_bf16        manifests of the versions still stored
    update_rms_mean, train_*        metrics.jsonl, RL steps
    trajectories, lag_*, generate_* the trajectory log and the plans
    update_pause_*, tensors_*       acknowledgements of the sync agents, each since its last start
    restarts                        incarnations after the first
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.quickstart.timeline import recorded_seconds
from jaxtrain.training.metrics import FILENAME, read_metrics
from rollout_bridge.control import (
    ACKS_PREFIX,
    RESULTS_PREFIX,
    Ack,
    EvaluationResult,
    read,
    read_state,
    readable,
)
from rollout_bridge.store import Store
from rollout_bridge.trajectories.accounting import count
from rollout_bridge.weights.format.chain import read_latest, read_manifest
from rollout_bridge.weights.format.manifest import BrokenVersion, Kind, Manifest
from rollout_bridge.weights.format.run import load as load_run


def metric_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of the run's metrics, none before the first step."""
    return read_metrics(run_dir / FILENAME) if (run_dir / FILENAME).exists() else []


def finished(config: AsyncGrpoConfig, store: Store) -> bool:
    """Whether the trainer has announced the end, after as many RL steps as the config asks for."""
    state = read_state(store)
    steps = sum(row["phase"] == "rl" for row in metric_rows(config.run_dir))
    return state is not None and state.finished and steps >= config.rl.steps


def summarize(config: AsyncGrpoConfig, store: Store) -> dict[str, Any]:
    """The contents of summary.json. None where there is nothing to count yet."""
    rows = metric_rows(config.run_dir)
    rl = [row for row in rows if row["phase"] == "rl"]
    return {
        "name": config.name,
        "engine": config.rollouts.engine,
        "finished": finished(config, store),
        **_rewards(store),
        **_versions(store),
        **_trajectories(store, rl),
        "update_rms_mean": _mean(_values(rl, "update_rms")),
        **_agents(store),
        "train_tokens_per_s": _rate(rl, "step_seconds"),
        "seconds": _seconds(config.run_dir, rows),
    }


def _rewards(store: Store) -> dict[str, Any]:
    keys = [key for key in store.list(RESULTS_PREFIX) if key.endswith("/result.json")]
    results = [result for key in keys if (result := read(store, EvaluationResult, key)) is not None]
    scored = sorted((each for each in results if each.reward_mean is not None), key=lambda each: each.version)
    return {
        "reward_before": scored[0].reward_mean if scored else None,
        "reward_after": scored[-1].reward_mean if len(scored) > 1 else None,
        # Greedy, of held-out prompts. None where the environment has no component "exact".
        "exact": {
            "greedy_before": scored[0].components.get("exact") if scored else None,
            "greedy_after": scored[-1].components.get("exact") if len(scored) > 1 else None,
        },
        "truncated_after": scored[-1].truncated / scored[-1].count if len(scored) > 1 else None,
        "evaluated_versions": [result.version for result in scored],
    }


def _versions(store: Store) -> dict[str, Any]:
    latest, run = read_latest(store), load_run(store)
    stored: list[Manifest] = []
    ref = latest.manifest if latest is not None else None
    while ref is not None and run is not None:
        try:
            manifest = read_manifest(store, ref, run)
        except BrokenVersion:
            break  # pruned: the means are over what is left
        stored.append(manifest)
        ref = manifest.parent
    deltas = [manifest.stats for manifest in stored if manifest.kind is Kind.DELTA]
    delta, reference = (
        _mean([stats.delta_bytes for stats in deltas]),
        _mean([stats.reference_bytes for stats in deltas]),
    )
    full = stored[0].stats.full_bytes_bf16 if stored else None
    return {
        "versions_published": latest.version if latest is not None else 0,
        "versions_stored": len(stored),
        "delta_bytes_mean": delta,
        "delta_reference_bytes_mean": reference,
        "full_bytes_bf16": full,
        "delta_ratio": full / delta if full and delta else None,
        "delta_to_reference": delta / reference if delta and reference else None,
        "restarts": max(0, run.incarnation - 1) if run is not None else 0,
    }


def _agents(store: Store) -> dict[str, Any]:
    acks = list(readable(store, Ack, ACKS_PREFIX))
    pauses = [pause for ack in acks for pause in ack.pause_ms]
    return {
        "update_pause_ms_p50": statistics.median(pauses) if pauses else None,
        "updates_applied": sum(ack.updates for ack in acks),
        "tensors_verified": sum(ack.verified_tensors for ack in acks),
    }


def _trajectories(store: Store, rl: Sequence[dict[str, Any]]) -> dict[str, Any]:
    counts = count(store)
    # Pauses between starts are left out.
    span = sum(_values(rl, "step_seconds")) + sum(_values(rl, "wait_seconds"))
    return {
        "trajectories": {
            "written": counts.written,
            "trained": counts.trained,
            "pending": counts.pending,
            "dropped": counts.dropped,
            "slots": counts.slots,
            "twice": counts.twice,
            "missing": counts.missing,
            "adds_up": counts.adds_up,
            "spans_crossing": counts.spans_crossing,
        },
        "lag_mean": counts.lag_mean if counts.trained_tokens else None,
        "lag_max": counts.lag_max if counts.trained_tokens else None,
        "generate_tokens_per_s": counts.generated_tokens / span if span > 0 else None,
    }


def _seconds(run_dir: Path, rows: Sequence[dict[str, Any]]) -> float | None:
    """Wall time of all invocations; of the metrics alone when the run was composed by hand."""
    recorded = recorded_seconds(run_dir)
    if recorded is not None:
        return recorded
    return rows[-1]["time"] - rows[0]["time"] if rows else None


def _values(rows: Iterable[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _rate(rows: Sequence[dict[str, Any]], seconds: str) -> float | None:
    total = sum(_values(rows, seconds))
    return sum(_values(rows, "tokens")) / total if total > 0 else None
