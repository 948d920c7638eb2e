"""Records of files, by index: JSON lines, Parquet, Arrow and plain text.

A record is a dict. Every reader says where a record stands, so that a problem is found in its file.
"""

from __future__ import annotations

import bisect
import glob
import json
import mmap
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from rollout_bridge.errors import ExpectedError

Record = Mapping[str, Any]
LINES = (".jsonl", ".ndjson")
ARROW = ".arrow"
PARQUET = ".parquet"
_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_CHUNK = 1 << 24


class BrokenRecord(ExpectedError, ValueError):
    """A record that cannot be read or has not the expected form; names its file and line."""


class Records(Protocol):
    """Records by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record:
        """Raises `BrokenRecord`."""
        ...

    def where(self, index: int) -> str:
        """`file:line`, or `file: row n`."""
        ...


def open_records(files: Sequence[str]) -> Records:
    """Records of every file in order.

    files: paths and patterns (`**` for any depth). .jsonl and .ndjson, also .gz and .zst; .parquet; .arrow; a
    directory that `datasets.Dataset.save_to_disk` wrote; anything else is text, one record {"text", "path"} a
    file.

    Raises `ValueError` for a pattern without a file, `BrokenRecord` for a file that cannot be opened.
    """
    readers = [_reader(path) for path in paths_of(files)]
    return readers[0] if len(readers) == 1 else _Joined(readers)


def paths_of(files: Sequence[str]) -> list[Path]:
    """Raises `ValueError` for a pattern without a file."""
    paths: list[Path] = []
    for pattern in files:
        found = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]
        found = [path for path in found if Path(path).is_file() or (Path(path) / "state.json").is_file()]
        if not found:
            raise ValueError(
                f"files: no file is named {pattern}; give paths or patterns such as data/*.jsonl"
            )
        paths += map(Path, found)
    return paths


def _reader(path: Path) -> Records:
    if path.is_dir():
        names = [
            Path(entry["filename"]) for entry in json.loads((path / "state.json").read_text())["_data_files"]
        ]
        return _Joined([_Arrow(path / name) for name in names])
    if path.suffix in _COMPRESSION:
        if path.suffixes[-2:-1] and path.suffixes[-2] in LINES:
            return _Lines(path, _expanded(path))
        raise BrokenRecord(f"{path}: compressed, and no .jsonl inside; expand it first")
    if path.suffix in LINES:
        return _Lines(path, path.open("rb"))
    if path.suffix == PARQUET:
        return _Parquet(path)
    return _Arrow(path) if path.suffix == ARROW else _Text(path)


def _expanded(path: Path) -> IO[bytes]:
    """The content in an unnamed temporary file, so that a line can be read alone; gone with the process."""
    import pyarrow as pa

    file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as its reader
    try:
        with pa.input_stream(str(path), compression=_COMPRESSION[path.suffix]) as source:
            shutil.copyfileobj(source, file, _CHUNK)
    except OSError as error:
        raise BrokenRecord(f"{path}: cannot be expanded ({error}); it is cut off or damaged") from error
    file.flush()
    return file


class _Lines:
    """JSON objects, one a line; empty lines are no records. Only the lines' places are held in memory."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        size = file.seek(0, 2)
        self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        ends = _newlines(self._bytes, size)
        starts = np.concatenate([np.zeros(1, np.int64), ends + 1])[: len(ends) + 1]
        stops = np.concatenate([ends, np.full(1, size, np.int64)])
        kept = stops > starts
        for line in np.flatnonzero(kept & (stops - starts < 16)):  # a longer one is no blank line
            kept[line] = bool(self._bytes[starts[line] : stops[line]].strip())
        kept = np.flatnonzero(kept)
        self._starts, self._stops, self._numbers = starts[kept], stops[kept], kept + 1

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Record:
        line = self._bytes[self._starts[index] : self._stops[index]]
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise BrokenRecord(f"{self.where(index)}: byte {error.start} is not UTF-8") from error
        except ValueError as error:
            raise BrokenRecord(f"{self.where(index)}: no JSON ({error})") from error
        if not isinstance(record, dict):
            raise BrokenRecord(f"{self.where(index)}: {type(record).__name__}, expected a JSON object")
        return record

    def where(self, index: int) -> str:
        return f"{self._path}:{self._numbers[index]}"


def _newlines(content: mmap.mmap | bytes, size: int) -> np.ndarray:
    """Offsets of the newlines, int64."""
    found = []
    for start in range(0, size, _CHUNK):
        chunk = np.frombuffer(content[start : start + _CHUNK], np.uint8)
        found.append(np.flatnonzero(chunk == ord("\n")).astype(np.int64) + start)
    return np.concatenate(found) if found else np.zeros(0, np.int64)


class _Parquet:
    """Rows; one row group at a time is in memory."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as parquet
        from pyarrow import ArrowInvalid

        self._path = path
        try:
            self._file = parquet.ParquetFile(path)
        except (ArrowInvalid, OSError) as error:
            raise BrokenRecord(f"{path}: no Parquet file ({error}); it is cut off or damaged") from error
        groups = self._file.metadata
        self._ends = list(accumulate(groups.row_group(i).num_rows for i in range(groups.num_row_groups)))
        self._held: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Record:
        group = bisect.bisect_right(self._ends, index)
        held, table = self._held
        if held != group:
            table = self._file.read_row_group(group)
            self._held = (group, table)
        return table.slice(index - (self._ends[group - 1] if group else 0), 1).to_pylist()[0]

    def where(self, index: int) -> str:
        return f"{self._path}: row {index}"


class _Arrow:
    """Rows of an Arrow file or stream, which is mapped, not read."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._path = path
        source = pa.memory_map(str(path))
        try:
            self._table = pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            try:
                self._table = pa.ipc.open_file(source).read_all()
            except pa.ArrowInvalid as error:
                raise BrokenRecord(f"{path}: no Arrow file ({error}); it is cut off or damaged") from error

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Record:
        return self._table.slice(index, 1).to_pylist()[0]

    def where(self, index: int) -> str:
        return f"{self._path}: row {index}"


class _Text:
    """One file as one record."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Record:
        try:
            return {"text": self._path.read_text(encoding="utf-8"), "path": str(self._path)}
        except (OSError, UnicodeDecodeError) as error:
            raise BrokenRecord(f"{self._path}: {error}") from error

    def where(self, index: int) -> str:
        return str(self._path)


class _Joined:
    """Several readers, one after the other."""

    def __init__(self, readers: Sequence[Records]) -> None:
        self._readers = readers
        self._ends = list(accumulate(len(reader) for reader in readers))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _at(self, index: int) -> tuple[Records, int]:
        which = bisect.bisect_right(self._ends, index)
        return self._readers[which], index - (self._ends[which - 1] if which else 0)

    def __getitem__(self, index: int) -> Record:
        reader, own = self._at(index)
        return reader[own]

    def where(self, index: int) -> str:
        reader, own = self._at(index)
        return reader.where(own)
