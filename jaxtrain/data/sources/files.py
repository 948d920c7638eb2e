"""What the sources that read files have in common: options, checks, and what a broken record costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxtrain.data.packing import Document
from jaxtrain.data.records import BrokenRecord, Record, Records, open_records, paths_of


@dataclass(frozen=True, kw_only=True)
class Files:
    """files: paths and patterns, see `open_records`. rename: column of the files -> the name that is read.

    broken: whether a record that cannot be read, or has not the expected form, ends the run.
    """

    files: tuple[str, ...]
    rename: Mapping[str, str] = field(default_factory=dict)
    broken: Literal["refuse", "skip"] = "refuse"

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("files: empty; name paths or patterns such as data/*.jsonl")
        paths_of(self.files)

    @property
    def columns(self) -> frozenset[str]:
        return frozenset()

    def records(self) -> Records:
        return open_records(self.files)


class FileDocuments:
    """Documents of records. made: of a record and where it stands; raises `BrokenRecord` without a place."""

    def __init__(self, options: Files, made: Callable[[Record, str], Sequence[Document]]) -> None:
        self._options, self._made = options, made
        self._records = options.records()
        self.broken: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Sequence[Document]:
        where = self._records.where(index)
        try:
            record = self._records[index]
            names = self._options.rename
            return self._made({names.get(key, key): value for key, value in record.items()}, where)
        except BrokenRecord as error:
            if self._options.broken == "refuse":
                raise
            self.broken[index] = str(error)
            return ()


def text_of(record: Record, column: str, where: str) -> str:
    """Raises `BrokenRecord` where the column is missing, is no text or is empty."""
    value = record.get(column)
    if value is None:
        raise BrokenRecord(f"{where}: no column {column}; it has {', '.join(record) or 'none'}")
    if not isinstance(value, str):
        raise BrokenRecord(f"{where}: {column} is {type(value).__name__}, expected text")
    if not value.strip():
        raise BrokenRecord(f"{where}: {column} is empty")
    return value
