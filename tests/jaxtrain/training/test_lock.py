"""One trainer a run, whoever else is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.load import load_config
from jaxtrain.config.resume import claim_run
from jaxtrain.config.run_lock import TRAINER
from jaxtrain.training.lock import RunInUse, locked

ROOT = Path(__file__).parents[3]
HOLDER = """
import pathlib, sys, time
from jaxtrain.training.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_trainer_is_refused_by_name_until_the_first_is_gone(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RunInUse, match=f"process {holder.pid} on .* trains this run"), locked(tmp_path):
            raise AssertionError("two train one run")
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
        with locked(tmp_path):
            assert str(holder.pid) not in (tmp_path / TRAINER).read_text()
        with locked(tmp_path):
            pass
    finally:
        holder.kill()
        holder.wait()


def test_settings_of_a_run_that_trains_are_not_changed_before_its_first_step(tmp_path):
    """A trainer that has made no step yet goes on with the settings and the files it was started with."""
    given = [f"runs_dir={tmp_path}", "name=x"]
    run_dir = claim_run(load_config(ROOT / "configs/sft.yaml", given))
    (run_dir / "tokenizer").mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(run_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        saved = (run_dir / "config.yaml").read_text()
        other = load_config(ROOT / "configs/sft.yaml", [*given, "seed=5"])
        with pytest.raises(ConfigError, match=f"process {holder.pid} on .* runs this already"):
            claim_run(other)
        assert (run_dir / "tokenizer").is_dir() and (run_dir / "config.yaml").read_text() == saved
        claim_run(load_config(ROOT / "configs/sft.yaml", given))  # other processes of the same trainer
    finally:
        holder.kill()
        holder.wait()
    claim_run(other)
    assert "seed: 5" in (run_dir / "config.yaml").read_text()
