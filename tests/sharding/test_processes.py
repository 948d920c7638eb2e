"""Processes: two real ones on this machine (gloo), waits that name what they wait for, and no-ops alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from sharding import cluster, processes
from sharding.errors import ProcessesError
from sharding.mesh import MeshSpec
from tests.ports import held_port
from tests.sharding import training_program

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("processes_program.py")
TRAINING = Path(training_program.__file__)


def start(*command: str, **variables: str) -> subprocess.Popen:
    environment = (
        os.environ
        | variables
        | {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "JAX_PLATFORMS": "cpu",
        }
    )
    return subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_two(program: Path) -> list[dict]:
    """The last line that each of two processes of a program prints, by process id."""
    outputs = outputs_of_two(lambda address, process: start(str(program), address, process))
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def outputs_of_two(start_one: Callable[[str, str], subprocess.Popen]) -> list[str]:
    with held_port() as port:
        running = [start_one(f"127.0.0.1:{port}", process) for process in "01"]
        try:
            outputs = [process.communicate(timeout=500) for process in running]
        finally:
            for process in running:
                process.kill()
    for process, (_, errors) in zip(running, outputs, strict=True):
        assert process.returncode == 0, errors
    return [output for output, _ in outputs]


@pytest.fixture(scope="module")
def two() -> list[dict]:
    """What each of two processes saw, by process id."""
    return run_two(PROGRAM)


def test_two_processes_train_with_fsdp_across_them_as_one_does():
    """Weights, momentum and batch are split over both; each reads its half of the rows."""
    alone = training_program.train(MeshSpec({"fsdp": -1}).build())
    assert alone["losses"][2] < 0.9 * alone["losses"][0]
    for found in run_two(TRAINING):
        np.testing.assert_allclose(found["losses"], alone["losses"], rtol=1e-6)
        for name, value in alone["params"].items():
            np.testing.assert_allclose(found["params"][name], value, atol=1e-6, err_msg=name)


def test_the_example_of_the_page_sums_over_both_processes_and_prints_what_the_page_shows():
    """Four devices each with a row of four ones, then four with rows of twos: 16 + 32."""
    example = ROOT / "docs/examples/sharding_pod.py"

    def start_one(address: str, process: str) -> subprocess.Popen:
        joining = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": process}
        return start(str(example), **joining)

    shown = [
        next(line for line in output.splitlines() if line.startswith(f"process {process} of 2"))
        for process, output in enumerate(outputs_of_two(start_one))
    ]
    assert shown == ["process 0 of 2: sum 48", "process 1 of 2: sum 48"]
    assert "\n".join(shown) in (ROOT / "docs/sharding.md").read_text()


def test_two_processes_join(two):
    assert [(seen["index"], seen["count"]) for seen in two] == [(0, 2), (1, 2)]


def test_broadcasts_agree_and_come_from_their_source(two):
    expected = [{"from": 0, "pair": [1, 2]}, [0], {"from": 1, "pair": [1, 2]}]
    assert [seen["broadcasts"] for seen in two] == [expected, expected]


def test_one_yes_is_the_answer_of_all(two):
    assert [seen["answers"] for seen in two] == [[False, True, False]] * 2
    assert [processes.any_of(flag, name="stop") for flag in (False, True)] == [False, True]


def test_a_flag_of_one_is_seen_by_all(two):
    assert [seen["flags"] for seen in two] == [[False, True, False]] * 2
    processes.raise_flag("alone")  # there is no other process to see it
    assert not processes.flag_raised("alone")


def test_a_dcn_axis_separates_the_processes(two):
    assert [seen["processes of the rows"] for seen in two] == [[True, True]] * 2


def test_an_all_reduce_crosses_both(two):
    """0 + ... + 7, twice, and 8 elements of 100."""
    assert [seen["sum"] for seen in two] == [2 * 28 + 8 * 100] * 2


def test_local_blocks_return_and_gather_sees_both(two):
    rows = [[2 * i + offset, 2 * i + 1 + offset] for offset in (0, 100) for i in range(4)]
    for seen in two:
        assert seen["local"]
        assert seen["own rows of a whole array"]
        assert seen["gathered"] == rows


def test_a_missed_barrier_names_itself_and_the_missing_process(two):
    message = two[0]["barrier error"]
    assert message.startswith("barrier 'checkpoint step 7': process 0 of 2 waited up to 0.5 s;")
    assert "processes not arrived: [1]" in message


def test_a_missed_broadcast_names_itself_and_its_source(two):
    message = two[1]["broadcast error"]
    assert message.startswith(
        "broadcast 'plan 3': process 1 of 2 waited up to 0.5 s for process 0 to send it"
    )


JOIN = """
import sys
from sharding import processes
from sharding.errors import ProcessesError
try:
    processes.initialize(sys.argv[1], 2, int(sys.argv[2]), timeout_seconds=1)
except ProcessesError as error:
    print(error)
    sys.stdout.flush()
    sys.exit(7)
"""


@pytest.mark.parametrize(
    ("process", "message"),
    [
        (0, "process 0 of 2 waited 1 s for all processes to join at {address}; start every process"),
        (1, "process 1 of 2 waited 1 s for the coordinator (process 0) at {address}: "),
    ],
)
def test_joining_alone_fails_with_a_name_and_an_ordinary_exit(process, message):
    with held_port() as port:
        address = f"127.0.0.1:{port}"
        running = start("-c", JOIN, address, str(process))
        try:
            output, errors = running.communicate(timeout=500)
        finally:
            running.kill()
    assert running.returncode == 7, errors
    assert output.startswith(message.format(address=address))


# What `srun --nodes=2 --ntasks-per-node=1` sets, on two hosts that are both this machine.
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
}
COUNT = """
import sys
from sharding import processes
from sharding.errors import ProcessesError
try:
    processes.initialize(timeout_seconds=300)
except ProcessesError as error:
    sys.exit(str(error))
print(processes.process_index(), processes.process_count())
processes.shutdown()
"""


def of_slurm(process: str, **variables: str) -> subprocess.Popen:
    return start("-c", COUNT, **SLURM | {"SLURM_PROCID": process} | variables)


def test_two_hosts_that_slurm_started_join_without_other_variables():
    def start_one(address: str, process: str) -> subprocess.Popen:
        return of_slurm(process, JAX_COORDINATOR_PORT=address.rpartition(":")[2])

    assert outputs_of_two(start_one) == ["0 2\n", "1 2\n"]


JOINED_ALONE = """
import sys
import jax
from sharding import processes
from sharding.errors import ProcessesError
jax.distributed.initialize(sys.argv[1], 1, 0)
processes.initialize()
try:
    processes.initialize(sys.argv[1], 2, 0)
except ProcessesError as error:
    print(error)
"""


def test_joining_fewer_than_the_arguments_say_is_refused():
    """The program joined through jax before, as a cluster of one."""
    with held_port() as port:
        running = start("-c", JOINED_ALONE, f"127.0.0.1:{port}")
        try:
            output, errors = running.communicate(timeout=500)
        finally:
            running.kill()
    assert output.startswith("processes disagree: {'jax counts': 1, 'joined': 1, 'expected': 2}."), errors


def test_devices_that_know_of_more_processes_than_joined_are_refused(monkeypatch):
    """Devices of a TPU pod know all its hosts; there is none here, so jax's count is replaced."""
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ProcessesError, match="{'jax counts': 4, 'joined': 1, 'expected': 1}"):
        processes.check_count()


@pytest.fixture
def slurm(monkeypatch):
    for name, value in (SLURM | {"SLURM_PROCID": "1"}).items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_count_that_contradicts_the_launcher_is_refused(slurm):
    with pytest.raises(ProcessesError, match="4 processes are to join, but SLURM_STEP_NUM_TASKS=2: "):
        processes.initialize("host:1", 4, 1)
    slurm.setenv("SLURM_NTASKS", "4")
    with pytest.raises(ProcessesError, match=r"SLURM_STEP_NUM_TASKS=2: 2 processes, but .* finds 4"):
        processes.initialize()


def test_a_process_that_slurm_started_alone_joins_nothing(slurm):
    """The shell of an allocation keeps the number of tasks of its job; its step has one."""
    slurm.setenv("SLURM_STEP_NUM_TASKS", "1")
    processes.initialize()
    assert processes.process_count() == 1


def test_a_batch_script_is_one_process(slurm):
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"):
        slurm.delenv(name)
    processes.initialize()
    assert processes.process_count() == 1


def test_one_process_says_that_it_runs_alone(slurm):
    slurm.setenv("JAX_NUM_PROCESSES", "1")
    processes.initialize()
    assert processes.process_count() == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4: 4 processes were started, but jax finds no"),
        ({"PMI_SIZE": "many"}, "PMI_SIZE='many' is not an integer"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"},
            r"JOB_COMPLETION_INDEX=3: .* Install jax\[k8s\]",
        ),
    ],
)
def test_started_processes_that_jax_cannot_find_are_refused(monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ProcessesError, match=message):
        processes.initialize()


def test_a_pod_that_is_not_of_an_indexed_job_is_alone(monkeypatch, recwarn):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    processes.initialize()
    assert processes.process_count() == 1
    assert not recwarn.list


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, []),  # one process on each of two hosts
        ({"SLURM_STEP_NUM_NODES": "1"}, [0]),
        ({"SLURM_STEP_NUM_NODES": "1", "CUDA_VISIBLE_DEVICES": "3"}, []),
    ],
)
def test_a_process_takes_all_devices_of_its_host_unless_it_shares_them(slurm, variables, expected):
    slurm.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        slurm.setenv(name, value)
    found = cluster.detect(timeout_seconds=1)
    assert found is not None
    assert found.local_device_ids == expected


def test_alone_everything_is_a_no_op():
    processes.initialize()
    processes.initialize(num_processes=1)
    processes.check_count()
    processes.barrier("nobody else")
    assert (processes.process_index(), processes.process_count()) == (0, 1)
    assert processes.broadcast_json({"a": (1, 2)}, name="x") == {"a": [1, 2]}
    processes.shutdown()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coordinator": "host:1"}, r"lacks \['num_processes', 'process_id'\]"),
        ({"coordinator": "host:1", "num_processes": 2, "process_id": 2}, r"process_id 2 is not in \[0, 2\)"),
        ({"coordinator": "host", "num_processes": 2, "process_id": 0}, r"'host' is not host:port"),
    ],
)
def test_wrong_arguments_are_named_before_any_wait(arguments, message):
    with pytest.raises(ProcessesError, match=message):
        processes.initialize(**arguments)


def test_joining_after_a_device_was_touched_says_so():
    jax.devices()
    with (
        held_port() as port,
        pytest.raises(ProcessesError, match=r"process 0 of 2 could not join at .*must be called before"),
    ):
        processes.initialize(f"127.0.0.1:{port}", 2, 0, timeout_seconds=300)


def test_arguments_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(ProcessesError, match="JAX_NUM_PROCESSES='two' is not an integer"):
        processes.initialize()


def test_large_and_non_finite_values_are_refused():
    with pytest.raises(ProcessesError, match=r"broadcast 'plan': \d+ bytes of JSON, at most 1048576"):
        processes.broadcast_json("x" * (1 << 20), name="plan")
    with pytest.raises(ValueError, match="JSON compliant"):
        processes.broadcast_json(float("nan"), name="plan")
    with pytest.raises(ProcessesError, match="source 3 is not one of 1"):
        processes.broadcast_json(1, name="plan", source=3)
