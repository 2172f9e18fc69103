"""JSON Lines: found by line ends, typed by declaration, whole when compressed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import JsonlSource
from pipeline.input import jsonl
from pipeline.input.arrow_types import parse_type
from pipeline.input.jsonl import JsonlFiles
from pipeline.input.lines import is_blank, row_starts
from pipeline.input.order import RowOrder
from pipeline.input.rows import read_rows
from pipeline.input.source import InputIndex, open_source


def lines(count: int, start: int = 0) -> bytes:
    return b"".join(
        json.dumps({"id": n, "text": f"row {n}"}).encode() + b"\n" for n in range(start, start + count)
    )


def column(source: JsonlFiles, index: InputIndex, name: str) -> list[object]:
    return [
        v for block in index.blocks for b in source.read(block, [name]) for v in b.column(name).to_pylist()
    ]


def read_all(path: Path, schema: dict[str, str] | None = None) -> tuple[InputIndex, pa.Table]:
    source = JsonlFiles(str(path), schema=schema)
    index = source.scan()
    batches = [b for block in index.blocks for b in source.read(block, index.schema.names)]
    return index, pa.Table.from_batches(batches, index.schema)


PACKERS = {
    "plain": lambda content: content,
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor().compress,
    # Several members in one file, as `cat a.gz b.gz` and pigz make them.
    "gz members": lambda content: gzip.compress(content[:1000]) + gzip.compress(content[1000:]) + b"\0" * 20,
    "zst frames": lambda content: b"".join(
        zstandard.ZstdCompressor().compress(part) for part in (content[:999], b"", content[999:])
    ),
}


@pytest.mark.parametrize("packed", PACKERS)
def test_rows_come_back_in_order(packed: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"  # the bytes say how it is packed, not the name
    path.write_bytes(PACKERS[packed](lines(3500)))
    source = open_source(JsonlSource(path=str(path)))
    index = source.scan()
    assert index.num_rows == 3500
    sizes = [block.num_rows for block in index.blocks]
    assert sizes == ([1000, 1000, 1000, 500] if packed == "plain" else [3500])
    assert all((block.locator is None) == (packed != "plain") for block in index.blocks)
    assert index.schema == pa.schema([("id", pa.large_string()), ("text", pa.large_string())])
    for name in ("id", "text"):
        expected = [str(n) if name == "id" else f"row {n}" for n in range(3500)]
        assert column(source, index, name) == expected
    batches = list(source.read(index.blocks[0], ["text", "id"]))
    assert max(batch.num_rows for batch in batches) <= 1024 and batches[0].schema.names == ["text", "id"]
    assert sum(batch.num_rows for batch in source.read(index.blocks[0], [])) == sizes[0]


def test_a_compressed_file_is_one_unit(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(250))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(250)))
    order = RowOrder(JsonlFiles(str(tmp_path)).scan().blocks)
    assert [(unit.start, unit.stop) for unit in order.units(100)] == [
        (0, 100),
        (100, 200),
        (200, 250),
        (250, 500),
    ]


def test_a_block_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(5000))
    index = JsonlFiles(str(path)).scan()
    content = path.read_bytes()
    block = index.blocks[3]
    start, stop = block.locator, index.blocks[4].locator
    assert start is not None and stop is not None and content[start:stop] == lines(1000, 3000)
    # Everything around it is now garbage, and nobody notices.
    path.write_bytes(b"x" * start + content[start:stop] + b"x" * (len(content) - stop))
    source = JsonlFiles(str(path), index=index)
    order = RowOrder(index.blocks)
    got = [row.value("id") for row in read_rows(source, order, [range(3500, 3600)], ["id"])]
    assert got == [str(number) for number in range(3500, 3600)]


def test_long_rows_make_short_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    content = [json.dumps({"text": "x" * length}) for length in [10] * 50 + [5000, 3, 3] + [400] * 10]
    path.write_text("\n".join(content))
    index, rows = read_all(path)
    assert rows.column("text").to_pylist() == [json.loads(line)["text"] for line in content]
    starts = [block.locator for block in index.blocks] + [path.stat().st_size]
    for block, begin, end in zip(index.blocks, starts[:-1], starts[1:], strict=True):
        assert block.num_rows == 1 or end - begin <= 1000 + 5020


@given(
    st.lists(
        st.sampled_from([b"{}", b' {"a": 1}', b"", b"\r", b"  \t", b'{"a": "' + b"y" * 30 + b'"}\r']),
        max_size=30,
    ),
    st.booleans(),
    st.integers(1, 50),
)
@settings(max_examples=200, deadline=None)
def test_row_starts_are_those_of_the_lines_that_are_not_blank(
    parts: list[bytes], ended: bool, chunk_bytes: int
) -> None:
    content = b"\n".join(parts) + (b"\n" if ended else b"")
    expected, offset = [], 0
    for line in content.split(b"\n"):
        if not is_blank(line):
            expected.append(offset)
        offset += len(line) + 1
    chunks = [content[at : at + chunk_bytes] for at in range(0, len(content), chunk_bytes)]
    assert [int(start) for starts in row_starts(iter(chunks)) for start in starts] == expected


@pytest.mark.parametrize("packed", ["plain", "gz", "zst"])
def test_blank_lines_are_no_rows(packed: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(PACKERS[packed](b'\xef\xbb\xbf{"a": "1"}\r\n\r\n  \n{"a": "2"}\n{"a": "3"}\n\n\n'))
    index, rows = read_all(path)
    assert rows.column("a").to_pylist() == ["1", "2", "3"]


@pytest.mark.parametrize("packed", ["plain", "gz", "zst"])
@pytest.mark.parametrize("content", [b"", b"\n\n", b"  \n"])
def test_no_rows_are_no_error(packed: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(PACKERS[packed](content))
    index = JsonlFiles(str(tmp_path)).scan()
    assert (index.num_rows, index.blocks, index.schema.names) == (0, (), [])


def test_an_undeclared_column_is_text_and_never_inferred(tmp_path: Path) -> None:
    """A column that is null at first and a number later lost four rows of five elsewhere."""
    values = [None, 1, 2.5, True, "plain", "", '{"x":1}', ["é", {"b": None}], {"a": 1, "c": "ü\u2028"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"v": value}) + "\n" for value in values * 60) + "{}\n")
    index, rows = read_all(path)
    assert index.schema.field("v").type == pa.large_string()
    expected = [None, "1", "2.5", "true", "plain", "", '{"x":1}', '["é",{"b":null}]', '{"a":1,"c":"ü\u2028"}']
    assert rows.column("v").to_pylist() == [*expected * 60, None]


def test_null_first_and_a_number_later_is_one_schema(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"score": None if n < 100 else n / 2}) + "\n" for n in range(500)))
    index, rows = read_all(path, {"score": "float64"})
    assert len(rows) == 500 and index.schema == pa.schema([("score", pa.float64())])
    assert rows.column("score").to_pylist() == [None] * 100 + [n / 2 for n in range(100, 500)]


def test_declared_types(tmp_path: Path) -> None:
    schema = {
        "n": "int64",
        "score": "float64",
        "ok": "bool",
        "when": "timestamp[us]",
        "day": "date32",
        "tags": "list<string>",
        "messages": "list<struct<role: string, content: string>>",
        "absent": "float32",
    }
    record = {
        "n": 2**53 + 1,
        "score": 3,
        "ok": True,
        "when": "2024-05-06T07:08:09",
        "day": "2024-05-06",
        "tags": ["a", None],
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant"}],
    }
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record) + "\n{}\n")
    index, rows = read_all(path, schema)
    assert [str(kind) for kind in index.schema.types[:4]] == ["int64", "double", "bool", "timestamp[us]"]
    assert index.schema.names == list(schema)
    first, second = rows.to_pylist()
    assert first["n"] == 2**53 + 1 and first["score"] == 3.0 and first["when"].isoformat() == record["when"]
    assert first["messages"][1] == {"role": "assistant", "content": None}
    assert set(second.values()) == {None}


def test_columns_are_those_of_every_files_first_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"x": 1, "y": 2}\n{"late": 3}\n')
    (tmp_path / "b.jsonl").write_text('{"y": 3, "z": 4}\n')
    source = JsonlFiles(str(tmp_path), schema={"z": "int64"})
    index = source.scan()
    assert index.schema == pa.schema([("x", pa.large_string()), ("y", pa.large_string()), ("z", pa.int64())])
    assert column(source, index, "x") == ["1", None, None]
    assert column(source, index, "z") == [None, None, 4]
    # A key that no first row has can still be asked for.
    assert column(source, index, "late") == [None, "3", None]


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": "fine", "o": 1}\n{"t": "\\ud83d\\ude00 \\ud83d!", "o": ["\\udc00"]}\n')
    _, rows = read_all(path)
    assert rows.column("t").to_pylist() == ["fine", "😀 \ufffd!"]
    assert rows.column("o").to_pylist() == ["1", '["\ufffd"]']


@pytest.mark.parametrize("packed", ["plain", "gz", "zst"])
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": 1', "is not JSON: Expecting"),
        (b"[1, 2]", r"is a JSON list: a row is an object"),
        (b"5", r"is a JSON int"),
        (b'{"id": "\xff"}', "is not JSON: .*utf-8"),
        (b"[" * 100_000, "is not JSON: .*recursion"),
    ],
)
def test_a_bad_line_is_named_when_it_is_read(packed: str, line: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(PACKERS[packed](lines(1500) + b"\n \n" + line + b"\n" + lines(10)))
    source = JsonlFiles(str(path))
    index = source.scan()  # it looks for line ends only
    assert index.num_rows == 1511
    with pytest.raises(ValueError, match=rf"a\.jsonl line 1503 {reason}"):
        column(source, index, "id")


def test_a_bad_first_line_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\nid,text\n")
    with pytest.raises(ValueError, match=r"a\.jsonl line 3 is not JSON: Expecting value at column 1"):
        JsonlFiles(str(tmp_path)).scan()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int64", 1.5),
        ("list<int64>", [1, 1.5]),
        ("struct<a: list<int8>>", {"a": [0.5]}),
        ("int64", 2**70),
        ("int64", True),
        ("string", 5),
        ("bool", 1),
        ("date32", "x"),
        ("float64", "1"),
    ],
)
def test_a_value_that_is_not_of_the_declared_type_is_named(kind: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"v": None}] * 5 + [{"v": value}] + [{"v": None}] * 5
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(
        ValueError, match=r"a\.jsonl line 6: column v has .*, which is no .*source\.schema\.v"
    ):
        read_all(path, {"v": kind})


@pytest.mark.parametrize("packed", ["gz", "zst", "zst frames"])
@pytest.mark.parametrize("cut", [1, 200])
def test_a_compressed_file_cut_short_is_an_error_and_no_shorter_file(
    packed: str, cut: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(PACKERS[packed](lines(5000))[:-cut])
    with pytest.raises(
        ValueError, match=r"a\.jsonl cannot be read as JSON Lines: its compressed data is cut short"
    ):
        JsonlFiles(str(path)).scan()


@pytest.mark.parametrize("packed", ["gz", "zst"])
def test_a_damaged_compressed_file_is_named(packed: str, tmp_path: Path) -> None:
    content = bytearray(PACKERS[packed](lines(5000)))
    content[len(content) // 2 : len(content) // 2 + 20] = b"\xff" * 20
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.jsonl cannot be read as JSON Lines: "):
        JsonlFiles(str(tmp_path)).scan()


def test_any_fsspec_url(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/lines/a.jsonl", lines(1500))
    memory.pipe_file("/lines/b.jsonl.zst", PACKERS["zst"](lines(500, 1500)))
    source = JsonlFiles("memory://lines")
    index = source.scan()
    assert column(source, index, "id") == [str(number) for number in range(2000)]
    memory.store.clear()


@pytest.mark.parametrize(
    "kind",
    [
        "int8",
        "string",
        "large_string",
        "list<item: string>",
        "large_list<item: int32>",
        "struct<a: int64, b: list<item: struct<c: bool>>>",
        "timestamp[us, tz=UTC]",
    ],
)
def test_a_type_reads_back_as_it_prints(kind: str) -> None:
    if "tz=" in kind:
        with pytest.raises(ValueError, match="is not an Arrow type"):
            parse_type(kind)
    else:
        assert str(parse_type(kind)) == kind


@pytest.mark.parametrize(
    "kind", ["text", "list<", "list<string", "struct<a>", "struct<>", "int64 x", "", "list<string>>"]
)
def test_a_type_that_does_not_exist_names_the_setting(kind: str) -> None:
    with pytest.raises(ValueError, match=r"source\.schema\.v: .+"):
        JsonlFiles("x", schema={"v": kind})
