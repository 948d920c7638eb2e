"""What the matrices of agent, server and store share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.fleet import Host


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host whose agent serves version 1 to clients who ask all the time."""
    host = Host(tmp_path_factory.mktemp("host"))
    host.publish()
    with host.clients():
        host.start_agent()
        host.until_served(1)
        yield host
    host.close()
