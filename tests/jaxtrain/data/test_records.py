"""Records of every kind of file, by index; what is broken is named by file and line."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard

from jaxtrain.data.records import BrokenRecord, open_records

ROWS = [{"text": f"Zeile {number} äöü", "n": number} for number in range(7)]
LINES = "\n".join(json.dumps(row) for row in ROWS)


def as_lines(path):
    (path / "x.jsonl").write_text(LINES + "\n")
    return "x.jsonl"


def as_lines_without_a_last_newline(path):
    (path / "x.ndjson").write_text("\n\n" + LINES.replace("\n", "\r\n \n"))
    return "x.ndjson"


def as_gzip(path):
    (path / "x.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    return "x.jsonl.gz"


def as_zstd(path):
    (path / "x.jsonl.zst").write_bytes(zstandard.compress(LINES.encode()))
    return "x.jsonl.zst"


def as_parquet(path):
    parquet.write_table(pa.Table.from_pylist(ROWS), path / "x.parquet", row_group_size=3)
    return "x.parquet"


def as_dataset(path):
    """The layout of `datasets.Dataset.save_to_disk`: Arrow streams and state.json."""
    directory = path / "saved"
    directory.mkdir()
    names = []
    for part in (ROWS[:4], ROWS[4:]):
        names.append(f"data-{len(names):05d}-of-00002.arrow")
        table = pa.Table.from_pylist(part)
        with pa.ipc.new_stream(str(directory / names[-1]), table.schema) as writer:
            writer.write_table(table)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return "saved"


KINDS = [as_lines, as_lines_without_a_last_newline, as_gzip, as_zstd, as_parquet, as_dataset]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_has_the_same_records_in_any_order(tmp_path, kind):
    records = open_records([str(tmp_path / kind(tmp_path))])
    assert [records[index] for index in range(len(records))] == ROWS
    assert [records[index] for index in (6, 0, 3)] == [ROWS[6], ROWS[0], ROWS[3]]


def test_files_and_patterns_come_one_after_the_other(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "b.py").write_text("print('ü')")
    (tmp_path / "deep" / "a.py").write_text("pass")
    records = open_records([str(tmp_path / "**/*.py"), str(tmp_path / as_lines(tmp_path))])
    assert len(records) == 9 and records[2] == ROWS[0]
    assert records[0] == {"text": "pass", "path": str(tmp_path / "deep/a.py")}
    assert records[1]["text"] == "print('ü')"
    assert records.where(8) == f"{tmp_path}/x.jsonl:7"


@pytest.mark.parametrize(
    "line, problem",
    [
        (b'{"text": "cut', "no JSON"),
        (b"[1, 2]", "list, expected a JSON object"),
        (b'{"text": "\xff\xfe"}', "byte 10 is not UTF-8"),
        (b"null", "NoneType"),
    ],
)
def test_a_broken_line_is_named_and_the_others_can_be_read(tmp_path, line, problem):
    (tmp_path / "x.jsonl").write_bytes(b'{"n": 1}\n\n' + line + b'\n{"n": 4}\n')
    records = open_records([str(tmp_path / "x.jsonl")])
    assert len(records) == 3 and records[0] == {"n": 1} and records[2] == {"n": 4}
    with pytest.raises(BrokenRecord, match=f"x.jsonl:3: .*{problem}"):
        records[1]


@pytest.mark.parametrize("kind", [as_gzip, as_zstd, as_parquet])
def test_a_file_that_is_cut_off_is_named(tmp_path, kind):
    path = tmp_path / kind(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BrokenRecord, match=f"{path.name}: .*cut off or damaged"):
        open_records([str(path)])


def test_a_text_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xff")
    with pytest.raises(BrokenRecord, match="x.txt"):
        open_records([str(tmp_path / "x.txt")])[0]


@pytest.mark.parametrize("missing", ["nothing.jsonl", "*.jsonl", "empty"])
def test_a_pattern_without_a_file_is_refused(tmp_path, missing):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="files: no file is named"):
        open_records([str(tmp_path / missing)])


def test_an_empty_file_has_no_records(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"")
    assert len(open_records([str(tmp_path / "x.jsonl")])) == 0
