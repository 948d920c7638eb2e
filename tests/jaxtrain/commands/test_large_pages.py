"""A command that computes on the CPU runs with large pages, and starts itself again once at most."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxtrain.commands.large_pages import SETTING, VARIABLE, with_large_pages

PROGRAM = (
    "import os\n"
    "from jaxtrain.commands.large_pages import use_large_pages\n"
    "print('started', flush=True)\n"
    "use_large_pages()\n"
    f"print('runs', os.environ.get({VARIABLE!r}), os.getpid(), __import__('sys').argv[1:])\n"
)


def _run(**environment: str) -> tuple[list[str], int]:
    given = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "JAX_PLATFORMS")}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "a", "b c"],
        env={**given, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return out.splitlines(), process.pid


def test_it_starts_itself_once_more_with_the_same_arguments_and_process_id():
    lines, pid = _run(JAX_PLATFORMS="cpu")
    assert lines == ["started", "started", f"runs {SETTING}=1 {pid} ['a', 'b c']"]


@pytest.mark.parametrize(
    "environment", [{"JAX_PLATFORMS": "tpu"}, {VARIABLE: f"{SETTING}=0", "JAX_PLATFORMS": "cpu"}]
)
def test_an_accelerator_or_a_choice_by_hand_changes_nothing(environment):
    lines, pid = _run(**environment)
    assert lines == ["started", f"runs {environment.get(VARIABLE)} {pid} ['a', 'b c']"]


def test_other_settings_of_glibc_are_kept():
    environment = with_large_pages({VARIABLE: "glibc.malloc.arena_max=2", "HOME": "/"})
    assert environment == {VARIABLE: f"glibc.malloc.arena_max=2:{SETTING}=1", "HOME": "/"}
