"""Messages of the trainer to the fleet through the store: its progress, and requests for evaluations."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from jaxtrain.config.optimization import EvaluationSection
from jaxtrain.training.progress import Progress
from rollout_bridge.control import EvaluationRequest, RunState
from rollout_bridge.errors import ExpectedError
from rollout_bridge.store import Store
from rollout_bridge.waiting import wait_for
from rollout_bridge.weights.format.pins import unanswered
from sharding import processes

log = logging.getLogger(__name__)

PIN_SECONDS = 3600.0  # a pin outlives a restart of the trainer, which renews it
POLL_SECONDS = 0.25


class EvaluationTimeout(ExpectedError):
    """No worker answered an evaluation in time."""


def announce(store: Store, phase: str, progress: Progress, version: int) -> None:
    """Writes control/state.json; workers and agents end at `FINISHED`."""
    if processes.process_index() == 0:
        state = RunState(
            phase=phase,
            step=progress.step,
            rl_step=progress.of("rl").steps,
            version=version,
            time=time.time(),
        )
        store.put_json(state.key, state.to_json())


class Evaluations:
    """Requests for greedy answers to held-out prompts, all tokens at one exact version.

    A request pins the sync agent of the worker that answers it at its version until it is answered.
    """

    def __init__(self, store: Store, section: EvaluationSection) -> None:
        self._store, self._prompts, self._timeout = store, section.prompts, section.timeout_s
        self._renewed = 0.0
        self.renew()

    def request(self, version: int, *, step: int) -> None:
        """Requests an evaluation of `version`, reached after RL step `step`; once for each."""
        if processes.process_index() == 0:
            request = EvaluationRequest(
                id=f"rl-{step:06d}-v{version}",
                version=version,
                prompts=(0, self._prompts),
                expires_after=PIN_SECONDS,
            )
            self._store.create_json(request.key, request.to_json())

    def renew(self) -> None:
        """Keeps unanswered requests from expiring while the trainer runs."""
        if time.monotonic() - self._renewed < PIN_SECONDS / 10 and self._renewed:
            return
        self._renewed = time.monotonic()
        for request in self._unanswered():
            renewed = request.model_copy(update={"renewals": request.renewals + 1})
            self._store.put_json(request.key, renewed.to_json())

    def answers(self, version: int, *, step: int, stop: Callable[[], None]) -> None:
        """Requests the last evaluation, and waits for all."""
        self.request(version, step=step)
        self.wait(stop=stop)

    def wait(self, *, stop: Callable[[], None]) -> None:
        """Returns when every request is answered. `stop` is called between polls and may raise.

        Raises `EvaluationTimeout` naming the requests; they expire if the run is not started again.
        """

        def look() -> bool | None:
            if not self._unanswered():
                return True
            stop()
            self.renew()
            return None

        wait_for(
            look,
            lambda: (
                f"evaluations {', '.join(each.id for each in self._unanswered())} in {self._store.url}: see "
                "that a rollout worker runs and its engine serves the version, or raise evaluation.timeout_s"
            ),
            timeout=self._timeout,
            poll=POLL_SECONDS,
            error=EvaluationTimeout,
        )

    def _unanswered(self) -> list[EvaluationRequest]:
        return unanswered(self._store) if processes.process_index() == 0 else []
