"""Asynchronous GRPO: a warm start, then policy-gradient steps on trajectories of the rollout fleet.

Trainer and fleet meet only in the store. Every step trains on a plan written before it (contract 4), and
every version follows the last one in the chain (contract 1), so a restart repeats the planned steps.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.data.environments import check_prompts_fit, contract_of, open_environment
from jaxtrain.data.sources.plans import discard_plans
from jaxtrain.publishing.evaluations import Evaluations, announce
from jaxtrain.publishing.publication import open_publishing
from jaxtrain.recipes.reinforcement import reinforcement
from jaxtrain.recipes.sft import check_base, supervised
from jaxtrain.training.loop import run_phase
from jaxtrain.training.run import open_run
from rollout_bridge.control import FINISHED, WARM_START
from rollout_bridge.store import Store
from rollout_bridge.trajectories.contract import create_or_compare
from sharding import processes


def run(config: AsyncGrpoConfig, run_dir: Path, *, discard_plans_after_step: int | None = None) -> None:
    """Trains until `rl.steps` are done and both evaluations are answered; run again to resume.

    discard_plans_after_step: delete the plans of later RL steps, to recover from a plan that cannot be
    trained.
    """
    store = Store.open(config.store_url)
    with ExitStack() as stack:
        opened = stack.enter_context(open_run(config, run_dir))
        store = opened.patient(store)
        environment = open_environment(config)
        check_prompts_fit(config, environment, opened.start.tokenizer)
        if processes.process_index() == 0:
            create_or_compare(store, contract_of(config, environment, opened.start.hf_config))
        policy = stack.enter_context(open_publishing(opened, store))
        evaluations = Evaluations(store, config.evaluation)
        rl = reinforcement(opened, store, policy, evaluations)  # before the warm start: it may be refused
        state, progress = opened.restore_or_initialize()
        if discard_plans_after_step is not None:
            discard_plans(store, after=discard_plans_after_step, trained=progress.of("rl").steps)

        warm_start = supervised(
            opened,
            "warm_start",
            config.warm_start,
            before=("rl",),
            before_step=lambda progress: announce(store, WARM_START, progress, policy.version),
        )
        state, progress = run_phase(opened, state, progress, warm_start)
        check_base(opened, progress)
        opened.save(state, progress, force=True)

        policy.follow(state, progress)
        if progress.of("rl").steps == 0 and policy.last.step == progress.step:
            evaluations.request(policy.version, step=0)
        state, progress = run_phase(opened, state, progress, rl)
        opened.save(state, progress, force=True)  # an export then has the last version

        opened.wait(lambda: policy.settle(opened.check_stop), state, progress)
        version = opened.wait(lambda: policy.finish(state, progress, opened.check_stop), state, progress)
        opened.wait(
            lambda: evaluations.answers(version, step=progress.of("rl").steps, stop=opened.check_stop),
            state,
            progress,
        )
        announce(store, FINISHED, progress, policy.version)
