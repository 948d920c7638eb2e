"""The tables of mutants name source that is there, so that no mutation is left out unseen."""

from __future__ import annotations

import shlex
from collections import Counter

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.run import INVALID, KILLED, ROOT, SURVIVED, outcome, tables

MUTANTS = [mutant for table in tables().values() for mutant in table]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_replaces_text_that_is_there_once_and_its_test_exists(mutant):
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1
    compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")
    nodes = [word for word in shlex.split(mutant.test) if word.startswith("tests/")]
    assert nodes
    for node in nodes:
        file, *names = node.split("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        for name in names:
            assert f" {name.partition('[')[0]}(" in text, node


def test_names_are_unique():
    names = [*tables(), *(mutant.name for mutant in MUTANTS)]
    assert [name for name, count in Counter(names).items() if count > 1] == []


CASES = {
    "return 2": KILLED,
    "return 0 + 1": SURVIVED,
    "return wrong_name": INVALID,
    "return (": INVALID,
}


@pytest.mark.parametrize(("new", "expected"), CASES.items())
def test_only_a_test_that_fails_kills_a_mutant(tmp_path, monkeypatch, new, expected):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # pytest alone starts in a quarter of the time
    (tmp_path / "one.py").write_text("def one():\n    return 1\n")
    (tmp_path / "test_one.py").write_text("import one\n\n\ndef test_one():\n    assert one.one() == 1\n")
    mutant = Mutant(name="of one", file="one.py", old="return 1", new=new, test="test_one.py::test_one")
    assert outcome(tmp_path, mutant) == expected
    assert "return 1\n" in (tmp_path / "one.py").read_text()
