"""Start, watch and stop a vLLM server process group.

The development endpoints that weight updates need (`VLLM_SERVER_DEV_MODE=1`) also let every client that can
connect call functions in the workers: the server binds a loopback address and nothing else is accepted.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollout_bridge.engines import server_args
from rollout_bridge.engines.protocol import EngineError
from rollout_bridge.engines.vllm import REQUEST_SECONDS, UPDATE_SECONDS, VllmEngine
from rollout_bridge.vllm_plugin import BACKEND, WORKER_EXTENSION
from rollout_bridge.waiting import looks, wait_for_async

logger = logging.getLogger(__name__)

STOP_SECONDS = 15.0
PREFILL_TOKENS = 2048  # of one step, where prompts are not cut; at least one whole context must fit
TAIL_LINES = 12
ERROR_LINES = 5
# vLLM's parent processes end with "see root cause above": the line that names it is far from the end.
NAMED_ERROR = re.compile(r"\b\w*(Error|Exception): ")


@dataclass(frozen=True, kw_only=True)
class VllmServerSettings:
    """host: a loopback address. startup_timeout: seconds until the server answers `/health`.
    request_timeout: of one completion, which an update that drains waits for; update_timeout: of an update.

    max_model_len: prompt and completion together. max_num_seqs: requests decoded at a time.
    dtype: of activations and unquantised weights.
    kv_cache_gib: memory for keys and values; None lets vLLM take what is free (it refuses a shared CPU host).
    enforce_eager: no compilation and no CUDA graphs; right on CPUs.
    chunked_prefill: prompts may be cut between steps. False on CPUs: vLLM 0.32 ends there when the prefill of
        a seeded request is cut ("CPU Generator does not use offset"), as it is after a pause of recompute_kv.
    return_routed_experts: send expert choices (needs vLLM's model runner V2: a GPU, or triton-cpu).
    cpu_threads: cores to bind, as in VLLM_CPU_OMP_THREADS_BIND ("0-15", by rank "0-7|8-15"); "auto" is all.
    tensor_parallel, data_parallel: ranks, of which every one takes part in every update. expert_parallel:
        experts are whole on one rank each.
    extra_args, environment: added last.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    startup_timeout: float = 600.0
    request_timeout: float = REQUEST_SECONDS
    update_timeout: float = UPDATE_SECONDS
    max_model_len: int = 4096
    max_num_seqs: int = 64
    dtype: str = "bfloat16"
    kv_cache_gib: float | None = None
    enforce_eager: bool = True
    chunked_prefill: bool = False
    return_routed_experts: bool = False
    cpu_threads: str = "auto"
    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    extra_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class VllmServer:
    """One server at a time on one port, its output appended to `log`."""

    def __init__(self, settings: VllmServerSettings, log: Path) -> None:
        """Raises `EngineError` for a host that is not a loopback address, or arguments that are reserved."""
        if settings.host != "localhost" and not _is_loopback(settings.host):
            raise EngineError(
                f"host: {settings.host!r} is not a loopback address. The server's development endpoints run "
                "code for whoever reaches them: use 127.0.0.1, and run rollout workers on this host"
            )
        if problem := server_args.problem(settings.extra_args):
            raise EngineError(f"extra_args: {problem}")
        self.settings = settings
        self.log = log
        self.url = f"http://{settings.host}:{settings.port}"
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """Process (and process group) id, None before the first start."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, directory: Path, version: int | None) -> None:
        """Load `directory`, wait until healthy, say which version it is.

        version: None leaves the server without one, so that it admits no request of a `VllmEngine`.

        Raises `EngineError` naming port, log and remedy if the port is taken, the server dies or takes longer
        than `startup_timeout`; no process is left then.
        """
        if self.alive:
            raise EngineError(f"vLLM at {self.url}: already runs (pid {self.pid}); stop it first")
        self.check_port()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rollout_bridge.engines.vllm_launch",
                *self.arguments(directory),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | self.environment(),
                start_new_session=True,
            )
        try:
            await self._wait_healthy()
        except BaseException:
            await self.stop()
            raise
        if version is not None:
            engine = VllmEngine(self.url)
            try:
                await engine.set_version(version)
            finally:
                await engine.close()
        logger.info("vLLM at %s: %s after %.0f s", self.url, directory.name, time.monotonic() - began)

    async def wait(self) -> int:
        """The exit status, once the server has ended. Raises `EngineError` if none was started."""
        if self._process is None:
            raise EngineError(f"vLLM at {self.url}: was not started")
        return await self._process.wait()

    async def stop(self) -> None:
        """End the server and all its children: SIGTERM, then SIGKILL to the process group."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                # Not wait_for: until Python 3.12 it loses a cancellation that comes with the end.
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                logger.warning("vLLM at %s: still there %.0f s after SIGTERM", self.url, STOP_SECONDS)
        await self._kill_group(process.pid)
        await process.wait()

    async def _kill_group(self, group: int) -> None:
        for pause in looks(STOP_SECONDS, 0.05):
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                return
            await asyncio.sleep(pause)
        # What is left are unreaped zombies, which hold neither port nor memory.
        logger.warning("vLLM at %s: process group %d outlives SIGKILL", self.url, group)

    def excerpt(self) -> str:
        """Of what this start wrote to the log: the errors it names, first ones first, and the last lines."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        errors = [line for line in lines[:-TAIL_LINES] if NAMED_ERROR.search(line)]
        return "\n".join([*errors[:ERROR_LINES], "...", *lines[-TAIL_LINES:]])

    def arguments(self, directory: Path) -> list[str]:
        """Command line of the API server."""
        s = self.settings
        arguments = [
            f"--model={directory}",
            "--served-model-name=policy",
            f"--host={s.host}",
            f"--port={s.port}",
            f"--dtype={s.dtype}",
            f"--max-model-len={s.max_model_len}",
            f"--max-num-seqs={s.max_num_seqs}",
            "--enable-scale-out",
            "--logprobs-mode=processed_logprobs",
            "--generation-config=vllm",
            "--skip-tokenizer-init",
            "--enable-prompt-tokens-details",
            "--disable-uvicorn-access-log",
            f"--weight-transfer-config={json.dumps({'backend': BACKEND})}",
            f"--worker-extension-cls={WORKER_EXTENSION}",
        ]
        if s.enforce_eager:
            arguments.append("--enforce-eager")
        if not s.chunked_prefill:
            whole_prompts = max(s.max_model_len, PREFILL_TOKENS)
            arguments += ["--no-enable-chunked-prefill", f"--max-num-batched-tokens={whole_prompts}"]
        if s.tensor_parallel > 1:
            arguments.append(f"--tensor-parallel-size={s.tensor_parallel}")
        if s.data_parallel > 1:
            arguments.append(f"--data-parallel-size={s.data_parallel}")
        if s.expert_parallel:
            arguments.append("--enable-expert-parallel")
        if s.return_routed_experts:
            arguments.append("--enable-return-routed-experts")
        if s.kv_cache_gib is not None:
            arguments.append(f"--kv-cache-memory-bytes={int(s.kv_cache_gib * 2**30)}")
        return [*arguments, *s.extra_args]

    def environment(self) -> dict[str, str]:
        return {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # Longer than any client keeps an idle connection: with vLLM's 5 s a request can meet the closing
            # of its connection, which fails an update for nothing.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
            "VLLM_CPU_OMP_THREADS_BIND": self.settings.cpu_threads,
            "ROLLOUT_BRIDGE_PARENT": str(os.getpid()),
            **self.settings.environment,
        }

    def check_port(self) -> None:
        """Raises `EngineError` if the port is taken."""
        s = self.settings
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((s.host, s.port))
            except OSError as error:
                raise EngineError(
                    f"port {s.port} on {s.host} cannot be used for vLLM ({error.strerror}): another program "
                    f"listens there, perhaps a server left over. End it (`ss -ltnp 'sport = :{s.port}'` "
                    "shows it) or choose another port"
                ) from error

    async def _wait_healthy(self) -> None:
        engine = VllmEngine(self.url, update_timeout=5.0)
        process = self._process
        assert process is not None

        async def healthy() -> bool | None:
            if process.returncode is not None:
                raise EngineError(
                    f"vLLM at {self.url}: ended with status {process.returncode} while starting. From "
                    f"{self.log}:\n{self.excerpt()}"
                )
            try:
                await engine.version()
            except EngineError:  # not listening yet
                return None
            return True

        try:
            await wait_for_async(
                healthy,
                lambda: (
                    f"vLLM at {self.url} to be healthy. Raise the start-up timeout, or see the cause in "
                    f"{self.log}:\n{self.excerpt()}"
                ),
                timeout=self.settings.startup_timeout,
                poll=0.25,
                error=EngineError,
            )
        finally:
            await engine.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
