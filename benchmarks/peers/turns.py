"""How a timed process takes turns with others: it runs the steps it is asked for and stays idle between.

Runs in every peer's own environment, so it imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class Turns:
    """The side of the timed process. Lines of standard input ask for steps; each answer is one line of JSON.

    Whatever the framework prints goes to standard error.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def ready(self, **facts: Any) -> None:
        """Says that the first step is done, with what it showed."""
        self._answer(facts)

    def requests(self):
        """The numbers of steps asked for, until the other side closes."""
        for line in sys.stdin:
            yield int(line)

    def serve(self, step: Callable[[], Any], facts: Callable[[], dict[str, Any]] = dict) -> None:
        """Times `step` as often as asked, until the other side closes."""
        for count in self.requests():
            seconds = []
            processor = time.process_time()
            for _ in range(count):
                started = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - started)
            self._answer(
                {"seconds": seconds, "processor": (time.process_time() - processor) / count, **facts()}
            )

    def _answer(self, facts: dict[str, Any]) -> None:
        self._answers.write(json.dumps(facts) + "\n")
        self._answers.flush()
