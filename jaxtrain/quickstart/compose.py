"""The processes of a run on one machine: ordinary commands that can be started by hand."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from jaxtrain.config.resume import SAVED
from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.quickstart.child import ChildSpec
from jaxtrain.quickstart.placement import available_cores, split, thread_environment
from rollout_bridge.lifetime import GRACE, PARENT


def compose(config: AsyncGrpoConfig, run_dir: Path) -> list[ChildSpec]:
    """The trainer first: the run ends with it. Then a server if the engine is vLLM, then the workers."""
    cores = available_cores()
    trainer_cores = fleet_cores = cores
    if config.processes.pin_cores:
        trainer_cores, fleet_cores = split(cores, trainer=config.processes.trainer_cores)

    def command(name: str, verb: str, *arguments: str, on: tuple[int, ...]) -> ChildSpec:
        return ChildSpec(
            name=name,
            argv=(sys.executable, "-m", "jaxtrain", verb, "--config", str(run_dir / SAVED), *arguments),
            environment={
                PARENT: str(os.getpid()),
                GRACE: str(config.processes.stop_timeout_s),
                # Trainer and embedded engines may share one accelerator: none takes all of it at once.
                "XLA_PYTHON_CLIENT_PREALLOCATE": os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
                **(thread_environment(on) if config.processes.pin_cores else {}),
            },
            cores=on if config.processes.pin_cores else (),
        )

    specs = [command("trainer", "train", on=trainer_cores)]
    if config.rollouts.engine == "vllm":
        specs.append(command("server-0", "serve", on=fleet_cores))
    for index in range(config.rollouts.workers):
        worker = f"worker-{index}"
        specs.append(command(worker, "rollout", "--worker", worker, on=fleet_cores))
    return specs
