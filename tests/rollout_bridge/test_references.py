"""A reference resolves to the object it names; the error of one that does not says what is known."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

from rollout_bridge.references import INHERITED, UnknownReference, resolve, search_path

ROOT = Path(__file__).parents[2]
BUILTIN = {"ordered": "collections:OrderedDict", "from_keys": "collections:OrderedDict.fromkeys"}


def find(reference: str, builtin: dict[str, str] = BUILTIN) -> object:
    return resolve(reference, group="rollout_bridge.tests", builtin=builtin, kind="mapping")


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A directory as that of a config file, on a search path of its own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(INHERITED, "")
    search_path(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("reference_under_test")]:
        del sys.modules[name]


def test_a_registered_name_and_the_reference_it_stands_for_are_the_same_object():
    assert find("ordered") is OrderedDict
    assert find("collections:OrderedDict") is OrderedDict
    assert find("from_keys") == OrderedDict.fromkeys


def test_a_file_beside_the_config_is_found(beside):
    (beside / "reference_under_test.py").write_text("class Mine:\n    limit = 7\n")
    assert find("reference_under_test:Mine.limit") == 7


def test_a_file_beside_the_config_does_not_hide_a_module_of_python(beside):
    (beside / "colorsys.py").write_text("rgb_to_hls = 'hidden'\n")
    assert callable(find("colorsys:rgb_to_hls"))


def test_adding_a_directory_twice_adds_it_once(beside):
    before = list(sys.path)
    search_path(beside)
    search_path(beside / ".." / beside.name)
    assert sys.path == before


def test_a_process_started_from_here_finds_the_file_too(beside):
    (beside / "reference_under_test.py").write_text("VALUE = 7\n")
    program = (
        "from rollout_bridge.references import resolve\n"
        "print(resolve('reference_under_test:VALUE', group='none', builtin={}, kind='number'))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "7", done.stderr


def test_an_entry_point_of_an_installed_package_is_a_name(beside):
    """As pip lays a package out: its module, and a dist-info directory with entry_points.txt."""
    (beside / "reference_under_test_package.py").write_text("VALUE = 'registered'\n")
    information = beside / "reference_under_test_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: reference-under-test-package\nVersion: 1.0\n"
    )
    (information / "entry_points.txt").write_text(
        "[rollout_bridge.tests]\ntheirs = reference_under_test_package:VALUE\n"
        "ordered = reference_under_test_package:VALUE\n"
    )
    assert find("theirs") == "registered"
    assert find("ordered") is OrderedDict  # a package does not change what a built-in name means


@pytest.mark.parametrize(
    ("reference", "lines"),
    [
        (
            "orderd",
            ["mapping 'orderd' is unknown", "did you mean 'ordered'?", "from_keys, ordered", "module:Name"],
        ),
        ("zzz", ["mapping 'zzz' is unknown", "Known: from_keys, ordered"]),
        ("os:", ["mapping 'os:' is unknown", "module:Name"]),
        ("os.path/../x:y", ["is unknown"]),
        ("collections:OrderdDict", ["collections", "has no 'OrderdDict'", "did you mean 'OrderedDict'?"]),
        (
            "reference_under_test_none:X",
            ["cannot import reference_under_test_none", "no such module", "Searched: "],
        ),
        ("collections.none_such:X", ["cannot import collections.none_such", "no such module"]),
    ],
)
def test_what_is_not_there_is_named_with_what_is(reference, lines):
    with pytest.raises(UnknownReference) as caught:
        find(reference)
    for line in lines:
        assert line in str(caught.value)


def test_the_search_path_in_the_error_has_the_directory_of_the_config(beside):
    with pytest.raises(UnknownReference, match=str(beside)):
        find("reference_under_test_none:X")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import reference_under_test_absent\n", "No module named 'reference_under_test_absent'"),
        ("def broken(:\n", "SyntaxError"),
        ("raise RuntimeError('no accelerator')\n", "RuntimeError: no accelerator"),
    ],
)
def test_a_module_that_does_not_import_is_reported_with_its_own_error(beside, text, problem):
    (beside / "reference_under_test.py").write_text(text)
    with pytest.raises(UnknownReference) as caught:
        find("reference_under_test:Mine")
    assert problem in str(caught.value) and "there is no such module" not in str(caught.value)


def test_an_error_about_a_name_says_what_the_name_stands_for():
    with pytest.raises(UnknownReference, match=r"mapping 'gone' \(collections:Gone\)"):
        find("gone", {"gone": "collections:Gone"})
