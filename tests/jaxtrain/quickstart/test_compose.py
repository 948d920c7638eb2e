"""A run on one machine is made of the ordinary commands, on cores of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from jaxtrain.config.load import load_config
from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.quickstart import compose as module
from jaxtrain.quickstart.compose import compose

ROOT = Path(__file__).parents[3]


def config(*overrides: str) -> AsyncGrpoConfig:
    loaded = load_config(ROOT / "configs/quickstart.yaml", overrides)
    assert isinstance(loaded, AsyncGrpoConfig)
    return loaded


def test_the_embedded_engine_needs_trainer_and_workers(tmp_path: Path) -> None:
    specs = compose(config("rollouts.workers=2"), tmp_path)
    saved = str(tmp_path / "config.yaml")
    assert [(spec.name, spec.argv) for spec in specs] == [
        ("trainer", (sys.executable, "-m", "jaxtrain", "train", "--config", saved)),
        (
            "worker-0",
            (sys.executable, "-m", "jaxtrain", "rollout", "--config", saved, "--worker", "worker-0"),
        ),
        (
            "worker-1",
            (sys.executable, "-m", "jaxtrain", "rollout", "--config", saved, "--worker", "worker-1"),
        ),
    ]
    assert all(spec.environment["JAXTRAIN_PARENT_PID"] == str(os.getpid()) for spec in specs)


def test_vllm_adds_a_server_between_them(tmp_path: Path) -> None:
    specs = compose(config("rollouts.engine=vllm"), tmp_path)
    assert [spec.name for spec in specs] == ["trainer", "server-0", "worker-0"]
    assert specs[1].argv[2:] == ("jaxtrain", "serve", "--config", str(tmp_path / "config.yaml"))


def test_trainer_and_fleet_get_cores_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_cores", lambda: (0, 1))
    trainer, worker = compose(config("processes.pin_cores=true"), tmp_path)
    assert (trainer.cores, worker.cores) == ((0,), (1,))
    assert worker.environment["OMP_NUM_THREADS"] == "1"
    trainer, worker = compose(config("processes.pin_cores=false"), tmp_path)
    assert (trainer.cores, worker.cores) == ((), ())
    assert "OMP_NUM_THREADS" not in worker.environment
