"""What the matrices of agent, server and store share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.fleet import Host


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host whose agent serves version 1 to clients who ask all the time. `limit`: the module's LIMIT."""
    host = Host(tmp_path_factory.mktemp("host"))
    host.limit = getattr(request.module, "LIMIT", host.limit)
    host.publish()
    with host.clients():
        host.start_agent()
        host.until_served(1)
        yield host
    host.close()
