"""A real vLLM server killed and hung before, in and after an update, under clients who check what it says.

The harness is that of tests/faults, and so is the law: served tokens are of the version they are labelled
with, or nothing is served, and it comes back by itself. Here log-probabilities tell, which the decoder
computes for each version (`tests.served_oracle`); every version has weights of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rollout_bridge.engines.protocol import Completion, Request
from rollout_bridge.store import Store
from rollout_bridge.weights.format import run as runs
from tests.faults.fleet import Host, until
from tests.faults.test_server import check
from tests.rollout_bridge.weights import tiny
from tests.served_oracle import ServedOracle, Weights
from tests.vllm import tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.faults]

PROMPT = 150  # tokens of a prompt: more than a block of the prefix cache
TOLERANCE = 0.05  # mean over an answer of |log-probability - decoder's|: vLLM computes in BF16
OTHER = 1.0  # what it is at least under any other version's weights


class VllmHost(Host):
    """A host whose server is vLLM; greedy clients, each answer held against the decoder's numbers."""

    server = "vllm"
    deadline = 400.0
    limit = 30.0

    def __init__(self, directory: Path) -> None:
        runs.create_or_join(Store.open(f"{directory}/store"), tiny_model.run_info())
        super().__init__(directory)
        self.oracle = ServedOracle(self.trainer.run, length=256)
        self.weights: dict[int, Weights] = {}
        self.largest = 0.0
        self._judging = threading.Lock()

    def publish(self, tree: tiny.Params | None = None) -> int:
        version = self.trainer.head.version + 1
        tree = tiny_model.random_params(self.trainer.run, seed=version) if tree is None else tree
        self.weights[version] = self.oracle.served(tree)
        return super().publish(tree)

    def difference(self, version: int, sequence: list[int], logprobs: np.ndarray) -> float:
        """Mean |log-probability - the decoder's under `version`| of the last tokens of `sequence`."""
        expected = self.oracle.logprobs(self.weights[version], sequence)[-len(logprobs) :]
        return float(np.abs(logprobs - expected).mean())

    def _request(self, client: int, turn: int) -> Request:
        return Request(
            request_id=f"{client}-{turn}",
            prompt_ids=[(7 * n + turn % 3) % 500 + 2 for n in range(PROMPT)],
            max_tokens=8 + 24 * client,
            temperature=0.0,
            seed=0,
            stop_ids=(),
        )

    def _judge(self, port: int, request: Request, completion: Completion) -> None:
        """By the tokens of the first version: later ones may look at keys and values of an earlier one."""
        if not completion.spans:
            return
        version, end = completion.spans[0].version, completion.spans[0].end
        sequence = [*request.prompt_ids, *completion.token_ids[:end].tolist()]
        with self._judging:
            found = self.difference(version, sequence, completion.logprobs[:end])
            if found > TOLERANCE:
                under = {
                    v: round(self.difference(v, sequence, completion.logprobs[:end]), 3) for v in self.weights
                }
                self.wrong.append(
                    f"an answer labelled version {version} differs by {found:.3f}; by version: {under}"
                )
            self.largest = max(self.largest, found)
            self._count(port, version, end)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmHost]:
    host = VllmHost(tmp_path_factory.mktemp("vllm-host"))
    host.publish()
    with host.clients():
        host.start_agent()
        host.until_served(1)
        yield host
    host.close()


def test_the_decoder_tells_versions_apart(host, record_property):
    """Updated in flight, no fault; and the answers of one version are far from what another's would be."""
    version = host.publish()
    host.until_served(version)
    rows = [host.oracle.logprobs(host.weights[v], host._request(0, 0).prompt_ids) for v in (1, version)]
    assert np.abs(rows[0] - rows[1]).mean() > OTHER
    assert not host.wrong
    record_property("outcome", f"mean difference from the decoder at most {host.largest:.3f}")


@pytest.mark.parametrize(
    ("point", "action"), [("stage", "die"), ("update", "die"), ("resume", "die"), ("finish", "freeze")]
)
def test_a_server_killed_or_hung_in_an_update_comes_back_at_the_new_version(
    host, point, action, record_property
):
    """Before the pause, in it with part of the weights gone, and with all of them and the old label."""
    refused = host.refusals
    check(host, point, action, record_property)
    assert host.refusals > refused and not host.wrong


def test_a_server_killed_after_an_update_says_the_same_from_its_files(host, record_property):
    """The version was updated in flight; a cold start of it answers with the same log-probabilities."""
    version = host.publish()
    before = host.until_served(version)
    host.arm("idle", "die")
    until("death", lambda: not host.fault.exists(), deadline=host.deadline)
    until("start", lambda: host.ack()["updates"] > before["updates"], deadline=host.deadline)
    host.tokens.clear()
    host.until_served(version)
    assert not host.wrong
    record_property("outcome", f"serves version {version} again; differences at most {host.largest:.3f}")
