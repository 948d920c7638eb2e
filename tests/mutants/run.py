"""Puts faults into a copy of the source, one at a time, and runs the test that must fail with each.

`python -m tests.mutants.run [NAME ...]`, from the repository's root. NAME: of a mutant, or of a table (a
module beside this one that has `MUTANTS`); none: all. The exit status is 1 if a mutant survived, was not
valid, or has a test that fails without it.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import tests.mutants
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
LIMIT_S = 900  # of one pytest run; a mutant that hangs longer counts as killed
KILLED, SURVIVED, INVALID, BROKEN = "killed", "SURVIVED", "invalid", "test broken without it"
# Errors of a mutation that is no fault of a trainer but no program at all.
NOT_A_PROGRAM = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NameError")


def tables() -> dict[str, tuple[Mutant, ...]]:
    """Mutants by the name of the module that lists them."""
    names = [module.name for module in pkgutil.iter_modules(tests.mutants.__path__)]
    modules = {name: importlib.import_module(f"tests.mutants.{name}") for name in sorted(names)}
    return {name: module.MUTANTS for name, module in modules.items() if hasattr(module, "MUTANTS")}


def chosen(names: list[str]) -> list[Mutant]:
    """The mutants that the names name, in the tables' order. Raises SystemExit at an unknown name."""
    found = tables()
    known = {*found, *(mutant.name for table in found.values() for mutant in table)}
    if unknown := sorted(set(names) - known):
        sys.exit(f"{unknown}: neither a mutant nor a table; expected some of {sorted(known)}")
    return [
        mutant
        for table, mutants in found.items()
        for mutant in mutants
        if not names or table in names or mutant.name in names
    ]


def copy_of_the_tracked_tree(to: Path) -> None:
    """As the files stand in the working tree, without what git does not track."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def verdict(tree: Path, arguments: list[str]) -> str:
    """Of pytest in the tree: SURVIVED if all tests pass, KILLED if one fails, INVALID if none could say."""
    report = tree / "mutant-report.xml"
    report.unlink(missing_ok=True)
    # Bytecode is taken for a source of the same size and the same second: so none is written.
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return KILLED
    if done.returncode == 0:
        return SURVIVED
    if done.returncode != 1:  # interrupted while collecting, a wrong argument, no test found
        return INVALID
    root = ElementTree.parse(report).getroot()
    messages = [found.get("message", "") for kind in ("failure", "error") for found in root.iter(kind)]
    no_program = any(error in message for message in messages for error in NOT_A_PROGRAM)
    return INVALID if no_program else KILLED


def broken_tests(tree: Path, mutants: list[Mutant]) -> set[str]:
    """The `test` of mutants that do not pass as the source stands; node ids run in one process."""
    distinct = list(dict.fromkeys(mutant.test for mutant in mutants))
    together = [test for test in distinct if not any(word.startswith("-") for word in shlex.split(test))]
    nodes = list(dict.fromkeys(node for test in together for node in shlex.split(test)))
    passed = set(together) if nodes and verdict(tree, nodes) == SURVIVED else set()
    return {test for test in distinct if test not in passed and verdict(tree, shlex.split(test)) != SURVIVED}


def outcome(tree: Path, mutant: Mutant) -> str:
    """With the mutation in place; the tree is as before afterwards."""
    file = tree / mutant.file
    source = file.read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        return INVALID
    mutated = source.replace(mutant.old, mutant.new)
    try:
        compile(mutated, mutant.file, "exec")
    except SyntaxError:
        return INVALID
    file.write_text(mutated, encoding="utf-8")
    try:
        return verdict(tree, shlex.split(mutant.test))
    finally:
        file.write_text(source, encoding="utf-8")


def main(names: list[str]) -> int:
    mutants = chosen(names)
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        tree = Path(directory)
        copy_of_the_tracked_tree(tree)
        broken = broken_tests(tree, mutants)
        rows: list[tuple[str, Mutant]] = []
        for mutant in mutants:
            started = time.monotonic()
            result = BROKEN if mutant.test in broken else outcome(tree, mutant)
            rows.append((result, mutant))
            print(f"{result}: {mutant.name} ({time.monotonic() - started:.0f} s)", flush=True)
    print("\n| mutation | in | killed by | result |\n|---|---|---|---|")
    for result, mutant in rows:
        print(f"| {mutant.name} | {mutant.file} | {mutant.test} | {result} |")
    counts = Counter(result for result, _ in rows)
    print("\n" + ", ".join(f"{count} {result}" for result, count in counts.items()))
    return 0 if set(counts) <= {KILLED} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
