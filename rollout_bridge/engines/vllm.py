"""A `RolloutEngine` over vLLM's HTTP interface (0.32), updated through `rollout_bridge.vllm_plugin`.

An update: stage in the workers while tokens are made; then `/pause?mode=keep`, `/start_weight_update`,
`/update_weights`, `/finish_weight_update` with the new version, `/resume`. Requests in flight go on, and
their completions come back with version spans. After any exception in an update the engine is unhealthy for
good: a reload that was begun cannot be retried, the server must be restarted from a fresh directory.

keep_kv: `/pause` gets `clear_cache=false`, so requests keep the keys and values of their old tokens, and
every prompt carries its version as `cache_salt`. A request sent at one version but prefilled at a later one
may meet blocks of the older policy; its first version span and `cached_tokens` show it, and it is generated
anew. recompute_kv: `/pause` preempts all requests and empties the cache; `/resume` prefills them again.

Workers of all ranks report by files (see `rollout_bridge.vllm_plugin.transfer`): the pause begins when the
last one has staged, and an update has succeeded when the last one has loaded.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from rollout_bridge.engines.protocol import (
    Completion,
    EngineError,
    FinishReason,
    Health,
    KvPolicy,
    Request,
    UpdateMode,
    UpdateReport,
)
from rollout_bridge.engines.vllm_protocol import (
    aborted,
    cached_prompt_tokens,
    generate_payload,
    parse_completion,
    parse_version,
)
from rollout_bridge.waiting import looks
from rollout_bridge.weights.read.update import Update

POLL_SECONDS = 0.1
STAGE_POLL_SECONDS = 0.01
PAUSE_MODES = {UpdateMode.IN_FLIGHT: "keep", UpdateMode.DRAIN: "wait", UpdateMode.ABORT: "abort"}
STALE_PREFIX_ATTEMPTS = 5
METRICS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


# Of clients without a config, as in tests: more than the longest answer, and than the largest update, takes.
REQUEST_SECONDS, UPDATE_SECONDS = 3600.0, 600.0


class VllmEngine:
    """Client of one server. The sync agent's also updates it; those of rollout workers only generate.

    url: http://host:port of the server.
    update_mode: what `update` does with running requests. To drain takes as long as the longest of them.
    moe_layers: layers with routed experts, to pick out of what a server with `--enable-return-routed-experts`
        sends; None leaves `Completion.routed_experts` None.
    request_timeout, update_timeout, version_timeout: seconds for one completion, for one update, and for a
        version that a request waits for.
    """

    name = "vllm"

    def __init__(
        self,
        url: str,
        *,
        kv_policy: KvPolicy = KvPolicy.KEEP,
        update_mode: UpdateMode = UpdateMode.IN_FLIGHT,
        moe_layers: Sequence[int] | None = None,
        request_timeout: float = REQUEST_SECONDS,
        update_timeout: float = UPDATE_SECONDS,
        version_timeout: float = UPDATE_SECONDS,
    ) -> None:
        self.url = url.rstrip("/")
        self.kv_policy = kv_policy
        self.update_mode = update_mode
        self._moe_layers = moe_layers
        self._request_timeout = request_timeout
        self._update_timeout = update_timeout
        self._version_timeout = version_timeout
        self._session: aiohttp.ClientSession | None = None
        self._failure = ""
        self._workers: int | None = None

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of the requests. Raises `EngineError`.

        Waits for minimum and exact versions; a request whose exact version has passed comes back aborted.
        """
        if self._failure:
            raise EngineError(self._failure)
        try:
            async with asyncio.TaskGroup() as together:  # an error cancels the others
                tasks = [together.create_task(self._complete(request)) for request in requests]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def update(self, update: Update) -> UpdateReport:
        """Serve the version of `update` from now on. Raises `EngineError`; the engine is then unhealthy."""
        if self._failure:
            raise EngineError(self._failure)
        began = time.perf_counter()
        drain = self._request_timeout if self.update_mode is UpdateMode.DRAIN else 0.0
        try:
            # A worker may still report after the update has failed: removing its report is no error.
            with tempfile.TemporaryDirectory(prefix="weight-update-", ignore_cleanup_errors=True) as reports:
                async with asyncio.timeout(self._update_timeout + drain):
                    tensors = await self._stage(update, Path(reports))
                    pause_ms = await self._swap(update.version)
                    load_ms = await self._loaded(update.version, Path(reports))
        except BaseException as error:
            self._failure = (
                f"vLLM at {self.url}: update to version {update.version} failed "
                f"({type(error).__name__}: {error}). A reload cannot be repeated: restart the server from a "
                "directory materialised from the mirror"
            )
            if isinstance(error, EngineError | TimeoutError):
                raise EngineError(self._failure) from error
            raise
        total_ms = (time.perf_counter() - began) * 1e3
        return UpdateReport(
            version=update.version, pause_ms=pause_ms, total_ms=total_ms, tensors=tensors, load_ms=load_ms
        )

    async def version(self) -> int | None:
        """The version served now, None before the first. Raises `EngineError` if no server answers."""
        return parse_version((await self._call("GET", "/weight_info"))["weight_version"])

    async def set_version(self, version: int) -> None:
        """Say which version the weights are that the server has loaded from a directory."""
        await self._call("POST", "/update_weight_version", {"new_version": str(version)})

    async def warm_up(self) -> None:
        """One token, whatever the version: the first rollout compiles nothing, a broken endpoint is seen.

        Raises `EngineError`.
        """
        request = Request(
            request_id="warm-up", prompt_ids=[0], max_tokens=1, temperature=1.0, seed=0, stop_ids=()
        )
        response = await self._call(
            "POST", "/inference/v1/generate", generate_payload(request, cache_salt="warm-up")
        )
        reason = response["choices"][0]["finish_reason"]
        if reason != FinishReason.LENGTH:
            raise EngineError(f"vLLM at {self.url}: warm-up ended with {reason!r}")

    async def health(self) -> Health:
        """Ready: answers, has a version, is not paused, and no update of this client failed."""
        try:
            version = await self.version()
            paused = (await self._call("GET", "/is_paused"))["is_paused"]
            metrics = await self._metrics()
            await self._call("GET", "/health")
        except EngineError as error:
            return Health(ready=False, version=None, reason=self._failure or str(error))
        reason = self._failure
        if not reason and version is None:
            reason = f"vLLM at {self.url}: no version yet; its agent sets one when the server has loaded"
        if not reason and paused:
            reason = f"vLLM at {self.url}: paused; wait for the update to end, or restart the server"
        return Health(ready=not reason, version=version, reason=reason, metrics=metrics)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def restarted(self) -> None:
        """Forget the failure: another server answers at the same URL now."""
        self._failure = ""
        self._workers = None

    async def _complete(self, request: Request) -> Completion:
        began = time.perf_counter()
        found: tuple[int, int] = (0, 0)
        for _ in range(STALE_PREFIX_ATTEMPTS):
            version = await self._admission_version(request)
            if request.exact_version is not None and version > request.exact_version:
                return aborted(request, kv_policy=self.kv_policy, seconds=time.perf_counter() - began)
            salt = str(version) if self.kv_policy is KvPolicy.KEEP else None
            response = await self._call(
                "POST",
                "/inference/v1/generate",
                generate_payload(request, cache_salt=salt),
                timeout=self._request_timeout,
            )
            completion = parse_completion(
                request,
                response,
                kv_policy=self.kv_policy,
                seconds=time.perf_counter() - began,
                moe_layers=self._moe_layers,
            )
            first = completion.spans[0].version if completion.spans else version
            if salt is None or first == version or not cached_prompt_tokens(response):
                return completion
            found = (version, first)
        raise EngineError(
            f"vLLM at {self.url}: request {request.request_id!r} met the prefix of an older policy "
            f"{STALE_PREFIX_ATTEMPTS} times (last: sent at version {found[0]}, sampled at {found[1]}). "
            "Updates come faster than prompts are admitted: publish less often, send fewer requests, or use "
            "recompute_kv"
        )

    async def _admission_version(self, request: Request) -> int:
        """The version served now, once there is one and it is late enough for the request."""
        wanted = max(request.minimum_version or 0, request.exact_version or 0)
        version = None
        for pause in looks(self._version_timeout, POLL_SECONDS):
            version = await self.version()
            if version is not None and version >= wanted:
                return version
            await asyncio.sleep(pause)
        raise EngineError(
            f"vLLM at {self.url}: request {request.request_id!r} waited {self._version_timeout:g} s for "
            f"version {wanted}, the server has {version}. See that the trainer publishes and that the sync "
            "agent of this host runs"
        )

    async def _stage(self, update: Update, reports: Path) -> int:
        """Stage in every worker and wait. The number of tensors staged; no weight has been touched."""
        request = {
            "version": update.version,
            "mirror": str(update.mirror),
            "changed": sorted(update.changed),
            "reports": str(reports),
        }
        await self._rpc("mirror_stage", json.dumps(request))
        statuses = await self._reported(reports, "staged")
        for status in statuses:
            if status["state"] != "ready" or status["version"] != update.version:
                raise EngineError(f"staging version {update.version}: a worker reports {status}")
        return max(status["tensors"] for status in statuses)

    async def _loaded(self, version: int, reports: Path) -> float:
        """Milliseconds of the slowest worker; that all of them have loaded `version` is checked."""
        statuses = await self._reported(reports, "loaded")
        if any(status["version"] != version for status in statuses):
            raise EngineError(f"version {version}: workers report {statuses}")
        return max(status["load_ms"] for status in statuses)

    async def _reported(self, reports: Path, what: str) -> list[dict[str, Any]]:
        """What every worker wrote, once the last one has."""
        if self._workers is None:
            self._workers = int((await self._call("GET", "/get_world_size"))["world_size"])
        while len(files := sorted(reports.glob(f"{what}-*.json"))) < self._workers:
            await asyncio.sleep(STAGE_POLL_SECONDS)
        return [json.loads(file.read_text()) for file in files]

    async def _swap(self, version: int) -> float:
        """The part in which no token is made: milliseconds it took."""
        clear = "false" if self.kv_policy is KvPolicy.KEEP else "true"
        began = time.perf_counter()
        drain = self.update_mode is UpdateMode.DRAIN
        await self._call(
            "POST",
            f"/pause?mode={PAUSE_MODES[self.update_mode]}&clear_cache={clear}",
            timeout=self._update_timeout + (self._request_timeout if drain else 0.0),
        )
        if drain:  # until now tokens were made
            began = time.perf_counter()
        await self._call("POST", "/start_weight_update")
        await self._call("POST", "/update_weights", {"update_info": {"version": version}})
        await self._call("POST", "/finish_weight_update", {"weight_version": str(version)})
        await self._call("POST", "/resume")
        return (time.perf_counter() - began) * 1e3

    async def _rpc(self, method: str, *args: str) -> list[dict[str, Any]]:
        """Call a method of every worker; its answers."""
        return (await self._call("POST", "/collective_rpc", {"method": method, "args": args}))["results"]

    async def _metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for line in str(await self._call("GET", "/metrics")).splitlines():
            name = line.partition("{")[0]
            if name in METRICS:
                found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
        return found

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> Any:
        """JSON or text of one exchange. Raises `EngineError` with the server's words."""
        if self._session is None:
            # The client is the first to drop an idle connection: see VLLM_HTTP_TIMEOUT_KEEP_ALIVE.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15)
            self._session = aiohttp.ClientSession(connector=connector)
        limit = aiohttp.ClientTimeout(total=timeout or self._update_timeout)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=limit) as response:
                text = await response.text()
                if response.status != 200:
                    raise EngineError(
                        f"vLLM at {self.url}: {method} {path} answered {response.status}: {text[:500]}; the "
                        "server's log says more"
                    )
                return json.loads(text) if response.content_type == "application/json" else text
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(
                f"vLLM at {self.url}: {method} {path}: {type(error).__name__}: {error}. See whether the "
                "server lives and what its log says"
            ) from error
