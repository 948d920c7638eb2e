"""What the trainer tells the fleet through the store: where it is, and which evaluations it wants."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from jaxtrain.training.context import Progress
from rollout_bridge.control import EVALUATIONS_PREFIX, STATE_KEY
from rollout_bridge.errors import ExpectedError
from rollout_bridge.store import Store
from sharding import processes

log = logging.getLogger(__name__)

PIN_SECONDS = 3600.0  # a pin outlives a restart of the trainer, which renews it
POLL_SECONDS = 0.25


class EvaluationTimeout(ExpectedError):
    """No worker answered an evaluation in time."""


def announce(store: Store, phase: str, progress: Progress, version: int) -> None:
    """Writes control/state.json; "finished" tells workers and agents to leave."""
    if processes.process_index() == 0:
        state = {
            "phase": phase,
            "step": progress.step,
            "rl_step": progress.rl_steps,
            "version": version,
            "time": time.time(),
        }
        store.put_json(STATE_KEY, state)


class Evaluations:
    """Requests for greedy answers to held-out prompts, all tokens at one exact version.

    A request pins sync agents at its version until it is answered. prompts: how many, from the first.
    timeout: seconds that `wait` waits for all answers.
    """

    def __init__(self, store: Store, *, prompts: int, timeout: float) -> None:
        self._store, self._prompts, self._timeout = store, prompts, timeout
        self._renewed = 0.0
        self.renew()

    def request(self, version: int, *, step: int) -> None:
        """Asks once for an evaluation of `version`, reached after RL step `step`; again does nothing."""
        if processes.process_index() == 0:
            name = f"rl-{step:06d}-v{version}"
            self._store.create_json(
                f"{EVALUATIONS_PREFIX}{name}.json",
                {
                    "id": name,
                    "version": version,
                    "prompts": [0, self._prompts],
                    "purpose": "eval",
                    "expires": time.time() + PIN_SECONDS,
                },
            )

    def renew(self) -> None:
        """Keeps unanswered requests from expiring while the trainer lives."""
        if time.monotonic() - self._renewed < PIN_SECONDS / 10 and self._renewed:
            return
        self._renewed = time.monotonic()
        for key in self._unanswered():
            value = self._store.read_json(key)
            if value is not None:
                self._store.put_json(key, {**value, "expires": time.time() + PIN_SECONDS})

    def wait(self, *, stop: Callable[[], None]) -> None:
        """Returns when every request is answered. `stop` is called between looks and may raise.

        Raises `EvaluationTimeout` naming the requests; they expire if the run is not started again.
        """
        deadline = time.monotonic() + self._timeout
        while unanswered := self._unanswered():
            stop()
            if time.monotonic() > deadline:
                raise EvaluationTimeout(
                    f"waited {self._timeout:g} s for evaluations {', '.join(unanswered)} in "
                    f"{self._store.url}: look whether a rollout worker runs and its engine serves the "
                    "version asked for, or raise evaluation.timeout_s"
                )
            self.renew()
            time.sleep(POLL_SECONDS)

    def _unanswered(self) -> list[str]:
        if processes.process_index() != 0:
            return []
        names = {
            key: key.removeprefix(EVALUATIONS_PREFIX).removesuffix(".json")
            for key in self._store.list(EVALUATIONS_PREFIX)
        }
        return [
            key for key, name in names.items() if self._store.read(f"evaluations/{name}/result.json") is None
        ]
