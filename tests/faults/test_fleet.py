"""Two servers of one agent: updates roll over them, and one that was away comes back at the newest one."""

from __future__ import annotations

import pytest

from tests.faults.fleet import Host, until


@pytest.fixture
def host(tmp_path):
    host = Host(tmp_path, servers=2)
    host.publish()
    with host.clients():
        host.start_agent()
        for port in host.ports:
            until(f"token of {port}", lambda port=port: host.tokens_of.get((port, 1)))
        yield host
    host.close()


def until_both_serve(host: Host, version: int) -> None:
    host.until_served(version)
    for port in host.ports:
        until(f"token of {port}", lambda port=port: host.tokens_of.get((port, version)))


def test_one_stops_while_the_other_serves_and_one_that_was_away_comes_back_at_the_newest_version(
    host, record_property
):
    until_both_serve(host, host.publish())
    until_both_serve(host, host.publish())
    pauses = host.fault.with_name("fault.json.pauses").read_text().split()
    steps = list(zip(pauses[::2], pauses[1::2], strict=True))
    assert len(steps) == 8
    for (one, stop), (other, go) in zip(steps[::2], steps[1::2], strict=True):
        assert (stop, go) == ("stop", "go") and one == other, "two servers were stopped at once"

    # The first dies in the update to 4 and starts from its files; 5 and 6 come while it does.
    host.arm("update", "die", ("load", "wait"))
    away, here = host.ports
    assert host.publish() == 4
    host.until_served(4)
    until("start", lambda: not host.fault.exists())
    for version in (5, 6):
        assert host.publish() == version
        host.until_served(version)
        assert host.tokens_of[here, version]
    host.let_go()
    until("token", lambda: host.tokens_of.get((away, 6)))
    assert not any(host.tokens_of.get((away, version)) for version in (4, 5))
    assert host.ack()["errors"] >= 1
    record_property("outcome", "the server that was away made tokens of versions 3 and 6 alone")
