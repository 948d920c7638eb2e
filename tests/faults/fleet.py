"""One host of the fleet under test: the agent's process, its server, and clients who check every token.

The law: a token's bits are the fingerprint of the version it is labelled with. The oracle of a version's bits
is the host quantiser on the trainer's parameters.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout_bridge.engines.protocol import Completion, EngineError, KvPolicy, Request
from rollout_bridge.engines.vllm import VllmEngine
from tests.faults.server import fingerprint
from tests.ports import free_port, listens
from tests.rollout_bridge.weights import tiny

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("agent_program.py")
DEADLINE = 200.0


def until(what: str, condition: Callable[[], Any], *, deadline: float = DEADLINE) -> Any:
    """What `condition` returns once it is true."""
    began = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - began < deadline, f"no {what} in {deadline:.0f} s"
        time.sleep(0.02)
    return found


class Host:
    """Trainer in this process, agent and server in others, over a store on disk.

    server: which one, as agent_program.py knows them. deadline: seconds that anything may take. patience:
        seconds that a client waits for an answer. limit: seconds after which the agent gives a server up; low
        where servers hang, else no more than a guard.
    """

    server = "small"
    deadline = DEADLINE
    patience = 20.0
    limit = 60.0

    def __init__(
        self, directory: Path, *, kv_policy: KvPolicy = KvPolicy.KEEP, servers: int = 1, **publisher
    ) -> None:
        self.directory = directory
        self.store = tiny.open_store(f"{directory}/store")
        self.trainer = tiny.publisher(self.store, **publisher)
        self.trainer.take_over()
        self.ports = [free_port() for _ in range(servers)]
        self.trees: dict[int, tiny.Params] = {}
        self.expected: dict[int, int] = {}
        self.agent: subprocess.Popen[bytes] | None = None
        self.tokens: dict[int, int] = {}  # served, by version
        self.tokens_of: dict[tuple[int, int], int] = {}  # by port and version
        self.wrong: list[str] = []
        self.refusals = 0
        self._counting = threading.Lock()  # of what clients count
        self._kv_policy = self.client_policy = kv_policy
        self._stop = threading.Event()

    @property
    def port(self) -> int:
        return self.ports[0]

    @port.setter
    def port(self, port: int) -> None:
        self.ports[0] = port

    @property
    def fault(self) -> Path:
        return self.directory / "fault.json"

    def publish(self, tree: tiny.Params | None = None) -> int:
        """One more version: a training step, or `tree`."""
        number = self.trainer.head.version + 1
        before = self.trees.get(number - 1)
        if tree is None:
            tree = tiny.params() if before is None else tiny.step(before, number)
        # The oracle first: the server may have the version before `publish` returns.
        self.trees[number] = tree
        self.expected[number] = fingerprint(tiny.canonical(self.trainer.run, tree))
        assert self.trainer.publish(tiny.on_device(tree), step=number).result(300).version == number
        return number

    def arm(self, point: str, action: str, *then: tuple[str, str]) -> None:
        """The server does `action` when it comes to `point`, and arms in the same moment what follows."""
        armed = None
        for place, what in reversed([(point, action), *then]):
            armed = {"point": place, "action": what, "then": armed}
        temporary = self.fault.with_suffix(".tmp")
        temporary.write_text(json.dumps(armed))
        os.replace(temporary, self.fault)

    def let_go(self) -> None:
        """What waits in the server goes on."""
        self.fault.with_name(f"{self.fault.name}.go").touch()

    def start_agent(self, **environment: str) -> subprocess.Popen[bytes]:
        """An agent with servers of its own: those of one that was killed end a moment after it."""
        until("ports", lambda: not any(map(listens, self.ports)), deadline=self.deadline)
        ports = ",".join(map(str, self.ports))
        with (self.directory / "agent.log").open("ab") as log:
            self.agent = subprocess.Popen(
                [sys.executable, str(PROGRAM), self.store.url, str(self.directory / "host"), ports],
                env=os.environ
                | {
                    "PYTHONPATH": str(ROOT),
                    "FAULT": str(self.fault),
                    "KV_POLICY": self._kv_policy.value,
                    "SERVER": self.server,
                    "LIMIT": str(self.limit),
                    "OMP_NUM_THREADS": "1",
                }
                | environment,
                stdout=log,
                stderr=log,
            )
        return self.agent

    def ack(self) -> Mapping[str, Any]:
        return self.store.read_json("weights/acks/agent.json") or {"version": None}

    def until_served(self, version: int) -> Mapping[str, Any]:
        """The acknowledgement of `version`, which the clients have then seen served."""

        def acknowledged() -> Any:
            agent = self.agent
            assert agent is None or agent.poll() is None, self.log()
            ack = self.ack()
            return ack if ack["version"] == version else None

        try:
            within = self.deadline
            ack = until(f"acknowledgement of version {version}", acknowledged, deadline=within)
            until(f"token of version {version}", lambda: self.tokens.get(version, 0) > 3, deadline=within)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None
        return ack

    def log(self) -> str:
        text = (self.directory / "agent.log").read_text(errors="replace")
        return f"agent: ...{text[-3000:]}"

    @contextmanager
    def clients(self, count: int = 2) -> Iterator[None]:
        """Clients that ask all the time, new prompts and old ones; every token must keep the law."""
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        assert not self.wrong, self.wrong[:5]

    def close(self) -> None:
        if self.agent is not None and self.agent.poll() is None:
            self.agent.kill()
            self.agent.wait()
        self.trainer.close()

    def _ask(self, client: int) -> None:
        async def ask() -> None:
            turn = 0
            engine = self._client(client)
            while not self._stop.is_set():
                turn += 1
                if not engine.url.endswith(f":{self._port(client)}"):
                    await engine.close()
                    engine = self._client(client)
                request = self._request(client, turn)
                try:
                    (completion,) = await engine.generate([request])
                except EngineError:  # no server, or not yet one with a version: refused, not wrong
                    with self._counting:
                        self.refusals += 1
                    await asyncio.sleep(0.05)
                    continue
                self._judge(self._port(client), request, completion)
            await engine.close()

        asyncio.run(ask())

    def _request(self, client: int, turn: int) -> Request:
        return Request(
            request_id=f"{client}-{turn}",
            prompt_ids=[1, 2, turn % 3],  # shared prefixes: a stale one would show
            max_tokens=4 + 8 * client,
            temperature=1.0,
            seed=turn,
            stop_ids=(),
        )

    def _judge(self, port: int, request: Request, completion: Completion) -> None:
        """Counts the tokens of an answer; `wrong` says which are not of the version they claim."""
        for span in completion.spans:
            for token in completion.token_ids[span.start : span.end].tolist():
                self._check(port, span.version, token)

    def _port(self, client: int) -> int:
        return self.ports[client % len(self.ports)]

    def _client(self, client: int) -> VllmEngine:
        return VllmEngine(
            f"http://127.0.0.1:{self._port(client)}",
            kv_policy=self.client_policy,
            request_timeout=self.patience,
            update_timeout=self.patience,
            version_timeout=self.patience,
        )

    def _check(self, port: int, version: int, token: int) -> None:
        if self.expected.get(version) != token:
            others = [other for other, value in self.expected.items() if value == token]
            self.wrong.append(f"a token labelled version {version} is of {others or 'no version at all'}")
        else:
            self._count(port, version, 1)

    def _count(self, port: int, version: int, tokens: int) -> None:
        with self._counting:
            self.tokens_of[port, version] = self.tokens_of.get((port, version), 0) + tokens
            self.tokens[version] = self.tokens.get(version, 0) + tokens
