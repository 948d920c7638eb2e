"""A file or directory appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollout_bridge.files import whole_directory, whole_file, write_whole


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_whole(path, "old")
    write_whole(path, "é")
    assert path.read_bytes() == b"\xc3\xa9"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"old")
    with whole_file(path) as file:
        file.write(b"n")
        file.flush()
        assert path.read_bytes() == b"old"
        file.write(b"ew")
    assert path.read_bytes() == b"new"


def test_a_failure_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), whole_file(path) as file:
        file.write(b"new")
        raise KeyError
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_durable_file_is_on_disk_before_its_name_is_and_then_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    path, sync = tmp_path / "state.json", os.fsync

    def watched(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        events.append(f"{'directory' if name == tmp_path.name else 'content'}, named: {path.exists()}")
        assert os.fstat(descriptor).st_size > 0  # the content has left Python's buffer
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write_whole(path, b"new", durable=True)
    assert events == ["content, named: False", "directory, named: True"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_directory_appears_at_the_end_or_never(tmp_path: Path, fails: bool) -> None:
    target = tmp_path / "model"
    try:
        with whole_directory(target) as partial:
            (partial / "config.json").write_text("{}")
            assert not target.exists()
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert os.listdir(tmp_path) == ([] if fails else ["model"])
    assert fails or (target / "config.json").read_text() == "{}"
