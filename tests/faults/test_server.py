"""The server killed, frozen, hung or failing at every point of its life, under clients who check every token.

One host goes through all of it; each case publishes the next version with a fault armed and ends when the
server serves that version again, by itself.
"""

from __future__ import annotations

import itertools

import pytest

from rollout_bridge.engines.protocol import KvPolicy
from tests.faults.fleet import Host, until
from tests.rollout_bridge.weights import tiny

POINTS = ("idle", "stage", "pause", "start", "update", "finish", "resume", "generate")
ACTIONS = ("die", "freeze", "hang", "fail")
# "fail" of an answer that is asked for again is no fault of the server's; "idle" and "generate" may repeat.
NO_FAULTS = {("idle", "fail"), ("generate", "fail")}
CASES = [case for case in itertools.product(POINTS, ACTIONS) if case not in NO_FAULTS]
QUICK = [("update", "die"), ("finish", "hang")]
LIMIT = 3.0  # seconds that a server that hangs costs a test; a slow one is given up too, which fails no test


def check(host: Host, point: str, action: str, record) -> None:
    before = host.ack()
    host.arm(point, action)
    version = host.publish()
    until(f"fault at {point}", lambda: not host.fault.exists(), deadline=host.deadline)
    ack = host.until_served(version)
    # A request that hangs is the client's to end; nothing else goes by unseen.
    if (point, action) != ("generate", "hang"):
        assert ack["errors"] + ack["updates"] > before["errors"] + before["updates"]
    if point not in ("idle", "generate"):
        ack = until("count", lambda: a if (a := host.ack())["errors"] > before["errors"] else None)
        assert ack["last_error"]
    assert not host.wrong
    errors = ack["errors"] - before["errors"]
    said = f", {errors} errors, last: {ack['last_error'][:80]}" if errors else ""
    record("outcome", f"serves version {version}{said}")


@pytest.mark.parametrize(("point", "action"), QUICK)
def test_a_server_that_fails_makes_no_token_of_other_weights(host, point, action, record_property):
    check(host, point, action, record_property)


@pytest.mark.faults
@pytest.mark.parametrize(("point", "action"), [case for case in CASES if case not in QUICK])
def test_a_server_may_fail_at_any_point(host, point, action, record_property):
    check(host, point, action, record_property)


def test_a_recovered_server_admits_nothing_before_its_version_is_known(host):
    """A start that fails is tried again; meanwhile clients see refusals, and no unlabelled token."""
    host.arm("idle", "die", ("load", "die"), ("load", "wait"))
    until("second start", lambda: not host.fault.exists())  # it waits, so there is no server
    refused = host.refusals
    until("refusal", lambda: host.refusals > refused)
    version = host.publish()
    host.let_go()
    host.until_served(version)
    assert not host.wrong


@pytest.mark.faults
def test_recompute_kv_empties_the_cache_and_no_prompt_meets_an_old_prefix(tmp_path):
    host = Host(tmp_path, kv_policy=KvPolicy.RECOMPUTE)
    host.publish()
    with host.clients():
        host.start_agent()
        for _ in range(4):
            host.until_served(host.publish())
    host.close()


@pytest.mark.faults
@pytest.mark.parametrize("broken", ["a prefix shared between versions", "a part of a module loaded"])
def test_the_clients_would_notice(broken, tmp_path):
    """The law bites: with the guard removed, tokens of wrong weights are seen."""
    host = Host(tmp_path)
    host.publish()
    if broken == "a prefix shared between versions":
        host.client_policy = KvPolicy.RECOMPUTE  # sends no salt, while the server keeps its cache
    with pytest.raises(AssertionError, match="a token labelled version"), host.clients():
        host.start_agent(PARTS="1" if "part" in broken else "")
        host.until_served(1)
        tree = dict(host.trees[1])
        tree["moe/mlp/experts/up_proj"] = tiny.step(tree, 9)["moe/mlp/experts/up_proj"]
        host.publish(tree)
        until("a wrong token", lambda: host.wrong)
    host.close()
