"""A small server that honours vLLM's lifecycle: what it answers shows which bits it holds.

Started in vLLM's place with vLLM's arguments. It loads an FP8 directory, stages from a mirror, and updates by
leaf modules: every tensor of a module that is loaded becomes garbage first, like memory off the meta device.
It keeps answers made from the prefix cache as stale as vLLM's would be. Every token is the fingerprint of the
weights at that moment (31 bits), so a client can tell which version made it.

Faults: the JSON file $FAULT, {"point", "action", "then"}, is taken once, when the server comes to `point`
(load, idle, stage, pause, start, update, finish, resume, generate), and `then` left in its place: action
"die" (SIGKILL), "freeze" (SIGSTOP), "hang" (no answer), "fail" (status 500) or "wait" (until the file
$FAULT.go exists).

Pauses go to $FAULT.pauses, a line each: port, "stop" or "go".
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import signal
import struct
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from rollout_bridge.lifetime import end_with_parent
from rollout_bridge.quantization.digest import digest
from rollout_bridge.vllm_plugin.units import unit_of, whole_units
from rollout_bridge.weights.read.mirror_view import MirrorView

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
BITS = {"F8_E4M3": np.uint8, "BF16": np.uint16, "F32": np.uint32}
GARBAGE = 0xA5
TOKEN_SECONDS = 0.01


def fingerprint(tensors: dict[str, np.ndarray]) -> int:
    """31 bits of all tensors."""
    return sum(digest(bits) for bits in tensors.values()) % (1 << 31)


def load(directory: Path) -> dict[str, np.ndarray]:
    """Bits by name, of a directory with one safetensors file."""
    data = (directory / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            bits = np.frombuffer(data[start:stop], BITS[entry["dtype"]])
            tensors[name] = bits.reshape(entry["shape"]).copy()
    return tensors


def take(path: Path, point: str) -> dict[str, Any] | None:
    """The fault that is armed for `point`, if it is this process's: what follows is in its place then."""
    if not path.exists():
        return None
    with path.with_suffix(".lock").open("a") as lock:  # several servers come to their points at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = json.loads(path.read_text()) if path.exists() else None
        if wanted is None or wanted["point"] != point:
            return None
        if wanted["then"]:
            following = path.with_suffix(".then")
            following.write_text(json.dumps(wanted["then"]))
            os.replace(following, path)
        else:
            path.unlink()
        return wanted


async def fault(point: str) -> None:
    """Does what $FAULT says for this point, once."""
    path = Path(os.environ["FAULT"])
    wanted = take(path, point)
    match wanted and wanted["action"]:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            await asyncio.sleep(3600)
        case "wait":
            while not path.with_name(f"{path.name}.go").exists():
                await asyncio.sleep(0.02)
        case "fail":
            raise web.HTTPInternalServerError(text=f"injected failure at {point}")


class Server:
    """Weights, label, and the state of an update."""

    def __init__(self, directory: Path, port: str = "") -> None:
        self.port = port
        self.weights = load(directory)
        self.label = "default"
        self.running = asyncio.Event()
        self.running.set()
        self.session = False
        self.staged: dict[str, np.ndarray] = {}
        self.staged_version = 0
        self.reports = directory
        self.cache: dict[tuple[str | None, tuple[int, ...]], int] = {}

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        await self.running.wait()
        await fault("generate")
        key = (body.get("cache_salt"), tuple(body["token_ids"]))
        cached = len(body["token_ids"]) if key in self.cache else 0
        prefix = self.cache.setdefault(key, fingerprint(self.weights))
        tokens, labels = [], []
        for position in range(body["sampling_params"]["max_tokens"]):
            await self.running.wait()
            tokens.append(prefix if position == 0 else fingerprint(self.weights))
            labels.append(self.label)
            await asyncio.sleep(TOKEN_SECONDS)
        edges = [0, *(i for i in range(1, len(labels)) if labels[i] != labels[i - 1]), len(labels)]
        spans = [{"version": labels[a], "start": a, "end": b} for a, b in zip(edges, edges[1:], strict=False)]
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": [{"token_id": token, "logprob": -1.0} for token in tokens]},
            "finish_reason": "length",
            "weight_versions": spans,
        }
        return {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}}

    async def rpc(self, method: str, args: list[str]) -> dict[str, Any]:
        if method == "mirror_stage":
            await fault("stage")
            request = json.loads(args[0])
            view = MirrorView.open(request["mirror"])
            if view.version != request["version"]:
                raise web.HTTPInternalServerError(text=f"the mirror is at {view.version}")
            names = whole_units(request["changed"], list(view.specs), PACKED)
            if os.environ.get("PARTS"):  # the guard removed: what changed, and not the modules it is part of
                names = tuple(request["changed"])
            self.staged = {name: np.array(view.tensor(name)) for name in names}
            self.staged_version = request["version"]
            self.reports = Path(request["reports"])
            self.report("staged")
        return {}

    def log_pause(self, what: str) -> None:
        with Path(os.environ["FAULT"] + ".pauses").open("a") as log:
            log.write(f"{self.port} {what}\n")

    def report(self, what: str) -> None:
        status = {
            "state": "ready",
            "version": self.staged_version,
            "tensors": len(self.staged),
            "load_ms": 1.0,
        }
        temporary = self.reports / "report.tmp"
        temporary.write_text(json.dumps(status))
        temporary.rename(self.reports / f"{what}-0.json")

    async def update(self) -> None:
        if not self.session:
            raise web.HTTPInternalServerError(text="no update session")
        touched = {unit_of(name, PACKED) for name in self.staged}
        for name, bits in self.weights.items():
            if unit_of(name, PACKED) in touched:
                bits.view(np.uint8)[...] = GARBAGE
        for number, (name, bits) in enumerate(self.staged.items()):
            if number == len(self.staged) // 2:
                await fault("update")
            self.weights[name][...] = bits

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        answer: Any = {}
        match request.path:
            case "/weight_info":
                await fault("idle")
                answer = {"weight_version": self.label}
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/is_paused":
                answer = {"is_paused": not self.running.is_set()}
            case "/get_world_size":
                answer = {"world_size": 1}
            case "/collective_rpc":
                answer = {"results": [await self.rpc(body["method"], body["args"])]}
            case "/pause":
                await fault("pause")
                self.log_pause("stop")
                self.running.clear()
                if request.query["clear_cache"] == "true":
                    self.cache.clear()
            case "/start_weight_update":
                await fault("start")
                if self.session or not self.staged_version:
                    raise web.HTTPInternalServerError(text="a session is open, or nothing is staged")
                self.session = True
            case "/update_weights":
                await self.update()
            case "/finish_weight_update":
                await fault("finish")
                self.report("loaded")
                self.session, self.label, self.staged_version = False, body["weight_version"], 0
            case "/resume":
                await fault("resume")
                self.log_pause("go")
                self.running.set()
            case "/inference/v1/generate":
                answer = await self.generate(body)
        return web.json_response(answer)


async def main() -> None:
    end_with_parent(int(os.environ["ROLLOUT_BRIDGE_PARENT"]), by=signal.SIGKILL)
    parser = argparse.ArgumentParser()
    for name in ("model", "host", "port"):
        parser.add_argument(f"--{name}")
    arguments, _ = parser.parse_known_args()
    await fault("load")
    server = Server(Path(arguments.model), arguments.port)
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, arguments.host, int(arguments.port)).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
