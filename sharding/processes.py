"""Processes of one program: joining, broadcasting small objects, barriers. Every wait has a timeout.

Nothing here needs more than one process: alone, `initialize`, `barrier` and `shutdown` do nothing and
`broadcast_json` returns its argument after a JSON round trip. All processes must make the same calls in the
same order, from one thread each. Objects are sent by jax's coordination service, not by devices, so a
broadcast never interleaves with collectives of a running step.

After a failed wait the processes may be at different calls: let the error end the process.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import socket
import threading
import time
from typing import Any

import jax

from sharding import cluster
from sharding.errors import ProcessesError

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_SECONDS = 300.0
SHUTDOWN_TIMEOUT_SECONDS = 60
# The coordination service is a control channel over gRPC with bounded messages; arrays belong on devices.
MAX_BROADCAST_BYTES = 1 << 20
# jax aborts the process at its own deadline, without a Python error, so that deadline is this much later.
_ABORT_MARGIN_SECONDS = 120

_uses: collections.Counter[str] = collections.Counter()


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    local_device_ids: list[int] | None = None,
) -> None:
    """Join the other processes of this program; call before anything touches a device.

    What is not given is read from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, and then
    from the launcher that started the process (`cluster.detect`: Slurm, Open MPI, TPU pod, Kubernetes Job).
    A process that was started alone returns at once.

    Args:
      coordinator: `host:port` of process 0, or "auto", which requires a launcher that jax detects.
      num_processes: how many processes join. 1 means alone, whatever the launcher started.
      process_id: which one this is; 0 hosts the coordinator.
      timeout_seconds: how long to wait for all of them.
      local_device_ids: devices of this process on its host. By default all, or one where the launcher
        started several processes on the host.

    Raises:
      ProcessesError: incomplete or contradictory arguments, coordinator unreachable, not all joined in time,
        or jax counts other processes than joined. After a failed wait the process must exit, because the
        runtime still waits in the background.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    num_processes = _from_environment(num_processes, "JAX_NUM_PROCESSES")
    process_id = _from_environment(process_id, "JAX_PROCESS_ID")
    if jax.distributed.is_initialized():
        check_count(num_processes)
        return
    if num_processes == 1:
        return
    deadline = time.monotonic() + timeout_seconds
    address = None if coordinator == "auto" else coordinator
    if address is None or num_processes is None or process_id is None:
        found = cluster.detect(coordinator=address, timeout_seconds=timeout_seconds)
        if found is not None:
            address, process_id = found.coordinator, found.process_id if process_id is None else process_id
            num_processes = found.num_processes if num_processes is None else num_processes
            local_device_ids = found.local_device_ids if local_device_ids is None else local_device_ids
        elif coordinator is None and num_processes is None and process_id is None:
            return
    _check_arguments(address, num_processes, process_id)
    assert address is not None and num_processes is not None
    said = cluster.announced()
    if said is not None and said[1] not in (1, num_processes):
        raise ProcessesError(
            f"processes.initialize: {num_processes} processes are to join, but {said[0]}: the launcher"
            f" started {said[1]}. Make JAX_NUM_PROCESSES and the launcher agree, or {cluster.ALONE}"
        )
    me, where = f"process {process_id} of {num_processes}", f"at {address}"
    if process_id != 0:
        _wait_for_port(address, deadline, me=me, timeout_seconds=timeout_seconds)
    logger.info("%s joins %s, waiting up to %g s", me, where, timeout_seconds)
    joined = _join(
        deadline,
        f"{me} could not join {where}",
        coordinator_address=address,
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=local_device_ids,
        # Everything is known, and jax's own detection would ask for what this process leaves out.
        cluster_detection_method="deactivate",
        initialization_timeout=int(timeout_seconds) + _ABORT_MARGIN_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_SECONDS,
    )
    if not joined:
        raise ProcessesError(
            f"{me} waited {timeout_seconds:g} s for all processes to join {where}; start every process with"
            " the same coordinator and count, look for one that died, or raise timeout_seconds"
        )
    check_count(num_processes)


def check_count(expected: int | None = None) -> None:
    """Check that the devices belong to as many processes as have joined. Touches the devices.

    Devices may know of processes that never joined: those of a TPU pod whose hosts were each started alone.
    expected: how many processes there should be; by default as many as have joined.

    Raises ProcessesError.
    """
    from jax._src import distributed

    joined = distributed.global_state.num_processes
    found = {"jax counts": jax.process_count(), "joined": joined, "expected": expected or joined}
    if len(set(found.values())) > 1:
        raise ProcessesError(
            f"processes disagree: {found}. Start every process of the program by one launcher that jax"
            " detects, or with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. JAX_PLATFORMS"
            " and TPU_PROCESS_BOUNDS restrict a process to its own devices"
        )


def shutdown() -> None:
    """Leave together, waiting up to a minute for the other processes. No-op in a single process."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    _uses.clear()


def process_index() -> int:
    """Which process this is. Touches no device in a single process."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def process_count() -> int:
    """How many processes run this program. Touches no device in a single process."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def barrier(name: str, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> None:
    """Wait until every process calls `barrier` with this `name`.

    Args:
      name: what the program is about to do, for instance "checkpoint step 120"; part of the error.
      timeout: seconds.

    Raises:
      ProcessesError: naming the barrier and the processes that had not arrived.
    """
    count = process_count()
    if count == 1:
        return
    client, me, key = _client(), process_index(), _use("barrier", name)
    client.key_value_set(f"{key}/{me}", "arrived")
    try:
        client.wait_at_barrier(key, _milliseconds(timeout))
    except jax.errors.JaxRuntimeError as error:
        arrived = {int(path.rsplit("/", 1)[-1]) for path, _ in client.key_value_dir_get(f"{key}/")}
        missing = sorted(set(range(count)) - arrived)
        raise ProcessesError(
            f"barrier {name!r}: process {me} of {count} waited up to {timeout:g} s;"
            f" processes not arrived: {missing or 'none (one failed while leaving)'}."
            f" Read their logs, or raise the timeout. Runtime: {_first_line(error)}"
        ) from error
    client.key_value_delete(f"{key}/{me}")


def broadcast_json(
    value: Any, *, name: str, source: int = 0, timeout: float = DEFAULT_TIMEOUT_SECONDS
) -> Any:
    """The `value` that process `source` passes, in every process; other processes' `value` is ignored.

    Args:
      value: anything JSON holds, up to 1 MiB encoded; NaN and infinities are errors.
      name: what it is, for instance "plan of step 12"; part of the error.
      source: the process whose value is sent.
      timeout: seconds, for the value and then for all processes to read it.

    Returns:
      The decoded value, the same in all processes and in a single one (tuples come back as lists).

    Raises:
      ProcessesError: value too large, or a wait that timed out. TypeError, ValueError: not JSON.
    """
    count, me = process_count(), process_index()
    if not 0 <= source < count:
        raise ProcessesError(f"broadcast {name!r}: source {source} is not one of {count} processes")
    encoded = json.dumps(value, allow_nan=False) if me == source else ""
    if len(encoded) > MAX_BROADCAST_BYTES:
        raise ProcessesError(
            f"broadcast {name!r}: {len(encoded)} bytes of JSON, at most {MAX_BROADCAST_BYTES};"
            " put large objects in the store and broadcast their key"
        )
    if count == 1:
        return json.loads(encoded)
    client, key = _client(), _use("broadcast", name)
    if me == source:
        client.key_value_set(key, encoded)
    else:
        try:
            encoded = client.blocking_key_value_get(key, _milliseconds(timeout))
        except jax.errors.JaxRuntimeError as error:
            raise ProcessesError(
                f"broadcast {name!r}: process {me} of {count} waited up to {timeout:g} s for process"
                f" {source} to send it. Read the log of process"
                f" {source}, or raise the timeout. Runtime: {_first_line(error)}"
            ) from error
    # All have read before the key goes, so the service never holds more than the broadcast in progress.
    barrier(f"all received {name}", timeout)
    if me == source:
        client.key_value_delete(key)
    return json.loads(encoded)


def any_of(flag: bool, *, name: str, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> bool:
    """True in every process if any of them passes True. All call it, and wait for one another.

    Args:
      flag: this process's answer.
      name: what is asked, for instance "stop"; part of the error.
      timeout: seconds, for all to answer and then for all to have read the answers.

    Raises:
      ProcessesError: naming the question and the processes that did not answer.
    """
    if process_count() == 1:
        return flag
    client, me, key = _client(), process_index(), _use("question", name)
    client.key_value_set(f"{key}/{me}", str(int(flag)))
    barrier(f"all answered {name}", timeout)
    answers = [answer for _, answer in client.key_value_dir_get(f"{key}/")]
    barrier(f"all read the answers to {name}", timeout)
    client.key_value_delete(f"{key}/{me}")
    return "1" in answers


def raise_flag(name: str) -> None:
    """Raises a flag that `flag_raised` shows in every process. Nobody waits; from any thread."""
    if jax.distributed.is_initialized():
        _client().key_value_set(f"sharding/flag/{name}", "1", allow_overwrite=True)


def flag_raised(name: str) -> bool:
    """Whether any process has raised the flag. False in a single process; from any thread."""
    if not jax.distributed.is_initialized():
        return False
    try:
        return bool(_client().key_value_try_get(f"sharding/flag/{name}"))
    except jax.errors.JaxRuntimeError:
        return False  # not raised, or the coordinator is gone, which ends the process


def _client() -> Any:
    """jax's coordination client: the one part of it with key-value reads and barriers that time out."""
    from jax._src import distributed

    return distributed.global_state.client


def _use(kind: str, name: str) -> str:
    """A key that is new for each use of a name and the same in all processes."""
    _uses[f"{kind}/{name}"] += 1
    return f"sharding/{kind}/{name}/{_uses[f'{kind}/{name}']}"


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def _from_environment(value: int | None, variable: str) -> int | None:
    if value is not None or variable not in os.environ:
        return value
    try:
        return int(os.environ[variable])
    except ValueError as error:
        raise ProcessesError(f"{variable}={os.environ[variable]!r} is not an integer") from error


def _check_arguments(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    if missing := [name for name, value in given.items() if value is None]:
        raise ProcessesError(
            f"processes.initialize: {given} lacks {missing}; give all three, or coordinator='auto' on a"
            " cluster that jax can detect"
        )
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ProcessesError(f"processes.initialize: process_id {process_id} is not in [0, {num_processes})")
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise ProcessesError(f"processes.initialize: coordinator {coordinator!r} is not host:port")


def _wait_for_port(address: str, deadline: float, *, me: str, timeout_seconds: float) -> None:
    """Wait for the coordinator's port, while failing is an error and not an abort inside the runtime."""
    host, _, port = address.rpartition(":")
    last: OSError | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=min(left, 5.0)).close()
            return
        except OSError as error:
            last = error
            time.sleep(min(0.2, max(left, 0.0)))
    raise ProcessesError(
        f"{me} waited {timeout_seconds:g} s for the coordinator (process 0) at {address}: {last};"
        " start process 0, and check the address, the port and the firewall"
    ) from last


def _join(deadline: float, failure: str, **arguments: Any) -> bool:
    """Whether jax's start-up ends in time; ProcessesError begins with `failure` where it ends in an error.

    It runs in a thread because it aborts the process at its own deadline, so this one must come first.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            jax.distributed.initialize(**arguments)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="jax-distributed-initialize", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if raised:
        raise ProcessesError(f"{failure}: {_first_line(raised[0])}") from raised[0]
    return not thread.is_alive()
