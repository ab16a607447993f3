"""Rows of data files: what is read though it looks unusual. Refusals: tests/refusals/test_refused.py."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest

from jaxrl.config import DataSection
from jaxrl.data.files import rows
from jaxrl.data.problems import read_problems


def read(path: Path) -> list[tuple[str, object]]:
    return [(where.removeprefix(f"{path}, "), row) for where, row in rows(path)]


@pytest.mark.parametrize("content", [b'\xef\xbb\xbf{"q": 1}\r\n\r\n{"q": 2}\r\n', b'  {"q": 1}\n \t\n{"q": 2}'])
def test_marks_line_ends_and_empty_lines(tmp_path: Path, content: bytes):
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    for name in ("a.jsonl", "b.jsonl.gz"):
        assert read(tmp_path / name) == [("line 1", {"q": 1}), ("line 3", {"q": 2})]


def test_a_parquet_file_that_breaks_off_says_where(tmp_path: Path):
    table = pyarrow.table({"q": [f"{i:x<40}" for i in range(4096)]})
    file = tmp_path / "a.parquet"
    parquet.write_table(table, file, row_group_size=1024, compression="snappy", use_dictionary=False)
    offset = parquet.ParquetFile(file).metadata.row_group(2).column(0).data_page_offset
    content = bytearray(file.read_bytes())
    content[offset + 200 : offset + 400] = b"\xff" * 200
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet: damaged after row 2048 \(Corrupt snappy compressed data"):
        read(file)


def test_fields_of_messages_that_templates_show(tmp_path: Path):
    said = [
        {"role": "user", "content": "1 + 1", "name": "ann"},
        {"role": "assistant", "content": "2", "reasoning_content": "two ones", "name": None, "id": 3},
        {"role": "user", "content": "2 + 2"},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": said, "answer": 4}) + "\n")
    (problem,) = read_problems([str(path)], "data.train_files", DataSection(messages_key="messages"))
    shown = {"role": "assistant", "content": "2", "reasoning_content": "two ones"}
    assert list(problem.messages) == [said[0], shown, said[2]]
