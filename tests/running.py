"""Whether processes run: one that has ended does not, even if nobody has asked yet how it ended."""

from __future__ import annotations

from pathlib import Path


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    return _group(pid) is not None


def group_runs(group: int) -> bool:
    """Whether a process of the group `runs`: where nobody reaps orphans, a group outlives them as zombies."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return any(_group(pid) == group for pid in pids)


def stopped(pid: int) -> bool:
    """Whether every thread of a process has come to the stop that a signal asks for."""
    try:
        stats = [(thread / "stat").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # a thread ended meanwhile, so not all had stopped
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def _group(pid: int) -> int | None:
    """Process group, None for what does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it ended before it was opened, or before it was read
        return None
    except PermissionError:  # /proc is mounted so that it shows the processes of others to nobody
        return None
    return None if fields[0] in "ZX" else int(fields[2])
