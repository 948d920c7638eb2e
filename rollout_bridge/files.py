"""Files and directories that appear whole or not at all: written under another name, then renamed.

A reader sees the old content or the new one, after a crash too. With `durable` the content is on disk before
the new name is, and the new name is on disk on return.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".tmp"  # ends the names of files in writing


def write_whole(path: Path, data: bytes | str, *, durable: bool = False) -> None:
    """`path` becomes `data`, text in UTF-8."""
    with whole_file(path, durable=durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def whole_file(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A binary file to write, which becomes `path` at the end; an exception removes it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


@contextmanager
def whole_directory(destination: Path, *, partial: Path | None = None) -> Iterator[Path]:
    """A new directory beside `destination`, renamed to it at the end; an exception removes it.

    partial: its name, if other processes have to know it.
    """
    destination = destination.absolute()
    if partial is None:
        partial = destination.with_name(f".{destination.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sync_directory(directory: Path) -> None:
    """Makes the names in `directory` durable: what was created, renamed and removed there."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
