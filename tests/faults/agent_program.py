"""A sync agent with its servers, in a process that tests may kill: `agent_program.py STORE DIRECTORY PORTS`.

The agent, its mirror and the client of the server are the real ones; the server is tests/faults/server.py, or
vLLM if $SERVER says so. vLLM takes no faults itself: the JSON file $FAULT, {"point", "action"}, is taken once
by its client, which signals all processes of the server when it is about to send what `point` (of `PATHS`)
names: action "die" (SIGKILL) or "freeze" (SIGSTOP).

$KILL_AT names a moment at which the agent kills itself (SIGKILL), the $KILL_AFTER-th time (from 0) it comes
there: fetch, journal, journalled, apply, applied, stage, pause, start, update, finish, resume, ack,
acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path

from rollout_bridge.agent import AgentSettings, SyncAgent
from rollout_bridge.engines import vllm_fleet, vllm_served, vllm_server
from rollout_bridge.engines.protocol import KvPolicy, UpdateMode
from rollout_bridge.lifetime import end_with_parent
from rollout_bridge.store import Store
from rollout_bridge.weights.read import journal
from rollout_bridge.weights.read.mirror import Mirror

SERVER = Path(__file__).with_name("server.py")
REAL = os.environ.get("SERVER") == "vllm"
LIMIT = float(os.environ.get("LIMIT", "60"))  # seconds: of an update, or of an answer of the small server
PATHS = {
    "idle": "/weight_info",
    "pause": "/pause",
    "start": "/start_weight_update",
    "update": "/update_weights",
    "finish": "/finish_weight_update",
    "resume": "/resume",
    "stage": "/collective_rpc",
}


def use_small_server() -> None:
    """vLLM's place is taken by the small server, which ends at once when it is asked to, or not at all."""
    start = asyncio.create_subprocess_exec

    async def small(program: str, *arguments: str, **options):
        assert arguments[:2] == ("-m", "rollout_bridge.engines.vllm_launch")
        return await start(program, str(SERVER), *arguments[2:], **options)

    vllm_server.asyncio.create_subprocess_exec = small
    vllm_server.STOP_SECONDS = 0.3
    vllm_served.ANSWER_SECONDS = LIMIT


class Moments:
    """Counts how often the process came to the moment it is to die at."""

    def __init__(self) -> None:
        self.moment = os.environ.get("KILL_AT", "")
        self.left = int(os.environ.get("KILL_AFTER", "0"))

    def pass_by(self, moment: str) -> None:
        if moment == self.moment:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1


def watched_store(url: str, moments: Moments) -> Store:
    class Watched(Store):
        def read(self, key: str) -> bytes | None:
            if key.endswith(".blob"):
                moments.pass_by("fetch")
            return super().read(key)

        def put_json(self, key: str, value) -> None:
            moments.pass_by("ack")
            super().put_json(key, value)
            moments.pass_by("acknowledged")

    return Watched.open(url)


def watch_mirror(moments: Moments) -> None:
    write, redo, changes = journal.write, Mirror._redo_journal, journal._changes

    def watched_write(*args):
        moments.pass_by("journal")
        write(*args)
        moments.pass_by("journalled")

    def watched_changes(*args):
        for number, change in enumerate(changes(*args)):
            if number == 2:
                moments.pass_by("apply")  # some bits are new, some old
            yield change

    def watched_redo(self: Mirror, *args) -> None:
        redo(self, *args)
        moments.pass_by("applied")

    journal.write, journal._changes, Mirror._redo_journal = watched_write, watched_changes, watched_redo


def strike(server: vllm_server.VllmServer, point: str) -> None:
    """The fault that is armed for `point`, to the whole process group."""
    armed = Path(os.environ["FAULT"])
    if not armed.exists():
        return
    wanted = json.loads(armed.read_text())
    if wanted["point"] == point and server.alive and server.pid:
        os.killpg(server.pid, {"die": signal.SIGKILL, "freeze": signal.SIGSTOP}[wanted["action"]])
        armed.unlink()


def watch_engine(served: vllm_served.ServedVllm, moments: Moments) -> None:
    engine = served._engine
    engine._update_timeout = LIMIT
    call = engine._call

    async def watched_call(method, path, *args, **kwargs):
        for moment, start in PATHS.items():
            if path.startswith(start):
                moments.pass_by(moment)
                if REAL:
                    strike(served.server, moment)
        return await call(method, path, *args, **kwargs)

    engine._call = watched_call


def main(url: str, directory: str, ports: str) -> None:
    end_with_parent(os.getppid(), by=signal.SIGKILL)
    logging.basicConfig(level=logging.INFO)
    if not REAL:
        use_small_server()
    moments = Moments()
    watch_mirror(moments)
    shared = Path(directory) / "engine"
    loaded: dict[str, Path] = {}
    servers = [
        vllm_served.ServedVllm(
            vllm_server.VllmServerSettings(
                port=int(port),
                startup_timeout=300.0,
                max_model_len=2048,
                max_num_seqs=16,
                kv_cache_gib=0.25,
            ),
            Path(directory) / port,
            kv_policy=KvPolicy(os.environ["KV_POLICY"]),
            update_mode=UpdateMode(os.environ.get("UPDATE_MODE", "in_flight")),
            engine_format="bf16" if REAL else "fp8",
            materialized=shared,
            loaded=loaded,
        )
        for port in ports.split(",")
    ]
    for server in servers:
        watch_engine(server, moments)
    served = servers[0] if len(servers) == 1 else vllm_fleet.ServedFleet(servers)
    agent = SyncAgent(
        watched_store(url, moments),
        Path(directory) / "mirror",
        served,
        "agent",
        settings=AgentSettings(poll=0.05, heartbeat=0.3, patience=300.0, retry=0.05),
    )

    async def follow() -> None:
        try:
            await agent.run()
        finally:
            await served.close()

    asyncio.run(follow())


if __name__ == "__main__":
    main(*sys.argv[1:])
