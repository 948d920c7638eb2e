"""Large pages for a process that computes on the CPU.

XLA's CPU backend allocates every temporary with malloc, and glibc returns large blocks to the kernel each
time: a step then spends its time on page faults of 4 KiB. With large pages (transparent huge pages by
madvise) the same training step took 0.6 times as long; see benchmarks/LOG.md. glibc reads the setting when a
process starts, so the command starts itself once more, with the same arguments and the same process id.
"""

from __future__ import annotations

import glob
import os
import platform
import sys
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
SETTING = "glibc.malloc.hugetlb"
ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*", "/dev/kfd")


def use_large_pages() -> None:
    """Call it first. It returns if the setting is made already, by hand too, or is of no use here."""
    if _computes_on_cpu(os.environ) and (environment := with_large_pages(os.environ)) != os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def with_large_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process with large pages; unchanged without glibc or where the user set it."""
    given = environment.get(VARIABLE, "")
    if platform.libc_ver()[0] != "glibc" or SETTING in given:
        return dict(environment)
    return {**environment, VARIABLE: ":".join(filter(None, [given, f"{SETTING}=1"]))}


def _computes_on_cpu(environment: Mapping[str, str]) -> bool:
    """By JAX_PLATFORMS, else by the accelerators of this host; jax itself is not started."""
    platforms = environment.get("JAX_PLATFORMS", "")
    return platforms == "cpu" if platforms else not any(glob.glob(pattern) for pattern in ACCELERATORS)
