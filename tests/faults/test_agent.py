"""The agent killed (SIGKILL) at every moment of an update and started again; clients check every token."""

from __future__ import annotations

import signal
import time

import pytest

from tests.faults.fleet import Host, until
from tests.ports import free_port

# (moment, how often it passes before it kills). The first acknowledgement is that of the start.
CASES = [
    ("fetch", 0),
    ("journal", 0),
    ("journalled", 0),
    ("apply", 0),
    ("applied", 0),
    ("stage", 0),
    ("pause", 0),
    ("start", 0),
    ("update", 0),
    ("finish", 0),
    ("resume", 0),
    ("ack", 1),
    ("acknowledged", 1),
]
QUICK = [("apply", 0)]


def check(host: Host, moment: str, after: int, record) -> None:
    assert host.agent is not None
    host.agent.kill()
    host.agent.wait()
    host.port = free_port()
    began = time.time()
    dying = host.start_agent(KILL_AT=moment, KILL_AFTER=str(after))

    def started() -> bool:
        ack = host.ack()  # one of a start that fails and is tried again has no update in it
        return dying.poll() is not None or (ack["time"] > began and ack["updates"] > 0)

    until("start of the agent", started)  # at the head of before; what follows is an update in flight
    host.publish()
    until(f"death at {moment}", lambda: dying.poll() is not None)
    assert dying.returncode == -signal.SIGKILL, host.log()
    version = host.publish()
    host.start_agent()
    ack = host.until_served(version)
    assert not host.wrong and ack["broken_versions"] == 0
    record("outcome", f"started again, serves version {version}, {ack['errors']} errors")


@pytest.mark.parametrize(("moment", "after"), QUICK)
def test_a_killed_agent_leaves_no_token_of_other_weights(host, moment, after, record_property):
    check(host, moment, after, record_property)


@pytest.mark.faults
@pytest.mark.parametrize(("moment", "after"), [case for case in CASES if case not in QUICK])
def test_an_agent_may_die_at_any_moment(host, moment, after, record_property):
    check(host, moment, after, record_property)


@pytest.mark.faults
def test_a_host_that_slept_is_brought_to_date_before_it_serves(host, record_property):
    """Ten versions behind: the server that comes up never serves the version its mirror held."""
    assert host.agent is not None
    host.agent.kill()
    host.agent.wait()
    host.port = free_port()
    old = host.trainer.head.version
    for _ in range(10):
        host.publish()
    before = dict(host.tokens)
    host.start_agent()
    host.until_served(old + 10)
    assert all(host.tokens.get(v, 0) == before.get(v, 0) for v in range(1, old + 10))
    record_property("outcome", f"from version {old} to {old + 10} before the first token")
