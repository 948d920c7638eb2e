"""The processes that a launcher started together: Slurm, Open MPI, Cloud TPU, GKE, an indexed Kubernetes Job.

jax reads the launcher's variables; this module adds the cases in which they would mislead. A process that
was started alone finds no cluster. Only a Cloud TPU host and a pod of a Kubernetes Job use the network.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import jax

from sharding.errors import ProcessesError

# Each holds the number of processes that one launch started. Open MPI's own comes before that of the Slurm
# step which started its daemons.
_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_TPU_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_KUBERNETES, _POD = "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"
ALONE = "set JAX_NUM_PROCESSES=1 if this process is meant to run alone"


@dataclass(frozen=True)
class Cluster:
    """name: jax's name of the launcher. local_device_ids: devices of this process; empty means all."""

    name: str
    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: list[int]


def detect(*, coordinator: str | None = None, timeout_seconds: float) -> Cluster | None:
    """The cluster of which this process is a part, None if it was started alone.

    coordinator: `host:port` of process 0 where it is known. timeout_seconds: for the host name of process 0.

    Raises ProcessesError: the variables contradict one another, or several processes were started but the
    others cannot be found.
    """
    said = announced()
    if said is not None and said[1] == 1:
        return None
    found = _environment()
    if found is None:
        if said is not None:
            raise ProcessesError(
                f"{said[0]}: {said[1]} processes were started, but jax finds no cluster to join, so each"
                " would run alone. Set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in each;"
                f" {ALONE}"
            )
        return None
    try:
        count, process_id, local = (
            found.get_process_count(),
            found.get_process_id(),
            found.get_local_process_id(),
        )
        if said is not None and said[1] != count:
            raise ProcessesError(
                f"{said[0]}: {said[1]} processes, but jax's detection ({found.name}) finds {count}. Start"
                f" them by one launcher that sets both, or set JAX_NUM_PROCESSES in each; {ALONE}"
            )
        if count == 1:
            return None
        address = coordinator or found.get_coordinator_address(
            timeout_secs=int(timeout_seconds),
            override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT"),
        )
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        if isinstance(error, ProcessesError):
            raise
        raise ProcessesError(
            f"jax's detection finds a cluster ({found.name}) but not its processes: {error}. Set"
            f" JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in each; {ALONE}"
        ) from error
    return Cluster(found.name, address, count, process_id, _local_devices(count, local))


def announced() -> tuple[str, int] | None:
    """The variable in which a launcher says how many processes it started, and the number; None without one.

    Slurm's number for a job does not count: a batch script, and a shell in an allocation, are one process.
    """
    for name in _COUNTS:
        if name in os.environ:
            try:
                return f"{name}={os.environ[name]}", int(os.environ[name])
            except ValueError as error:
                raise ProcessesError(f"{name}={os.environ[name]!r} is not an integer") from error
    for name in _TPU_HOSTS:
        if (hosts := os.environ.get(name)) and _tpu_allowed():
            slices = int(os.environ.get("MEGASCALE_NUM_SLICES") or 1)
            return f"{name}={hosts}", len(hosts.split(",")) * slices
    return None


def _environment() -> Any:
    """jax's description of the cluster, a class of `jax._src.clusters`, or None."""
    from jax._src import clusters

    for kind in clusters.ClusterEnv._cluster_types:
        if kind.opt_in_only_method or (kind.name.endswith("tpu") and not _tpu_allowed()):
            continue
        if kind is clusters.K8sCluster and not _indexed_pod():
            continue
        if kind.is_env_present():
            return kind
    return None


def _tpu_allowed() -> bool:
    """False on a TPU host whose program is restricted to other devices, as tests are."""
    platforms = str(getattr(jax.config, "jax_platforms", None) or "")
    return not platforms or "tpu" in platforms.split(",")


def _indexed_pod() -> bool:
    """Whether this is a pod of an indexed Job. A pod of another kind, such as a notebook's, is alone."""
    if _KUBERNETES not in os.environ or _POD not in os.environ:
        return False
    if importlib.util.find_spec("kubernetes") is None:
        raise ProcessesError(
            f"{_POD}={os.environ[_POD]}: this is a pod of an indexed Kubernetes Job, and without the package"
            " `kubernetes` jax cannot find the others. Install jax[k8s], or set JAX_COORDINATOR_ADDRESS,"
            f" JAX_NUM_PROCESSES and JAX_PROCESS_ID in each; {ALONE}"
        )
    return True


def _local_devices(count: int, local: int | None) -> list[int]:
    """All devices if this process is the only one of its host, or sees one GPU; else one by its local id."""
    alone = str(count) == os.environ.get("SLURM_STEP_NUM_NODES") or (
        os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("ROCR_VISIBLE_DEVICES", ""))
    one_gpu = bool(visible) and "," not in visible
    return [] if local is None or alone or one_gpu else [local]
