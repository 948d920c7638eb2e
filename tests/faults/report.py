"""A table of the fault matrix: case, what was observed, seconds. `pytest -p tests.faults.report`.

Written to the file that $FAULTS_REPORT names, as Markdown, each case as it ends, so a run that is cut short
leaves what it did. A test says what it observed with `record_property("outcome", text)`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

_PATH = Path(os.environ.get("FAULTS_REPORT", "runs/faults.md"))


def pytest_sessionstart(session: pytest.Session) -> None:
    _PATH.parent.mkdir(parents=True, exist_ok=True)
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    title = f"Faults, {when} UTC, {os.cpu_count()} cores"
    _PATH.write_text(f"{title}\n\n| case | outcome | seconds |\n|---|---|---|\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    said = dict(report.user_properties).get("outcome", "as the test states")
    if report.failed:
        said = f"FAILED in {report.when}: {str(report.longrepr).strip().splitlines()[-1][:160]}"
    case = report.nodeid.replace("|", "/").removeprefix("tests/")
    with _PATH.open("a") as table:
        table.write(f"| {case} | {str(said).replace('|', '/')} | {report.duration:.1f} |\n")


def pytest_terminal_summary(terminalreporter) -> None:
    text = _PATH.read_text()
    cases, failed = text.count("\n| ") - 1, text.count("| FAILED")
    terminalreporter.write_line(f"{cases} cases, {failed} failed: {_PATH}")
