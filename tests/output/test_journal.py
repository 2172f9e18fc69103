"""Journals: torn ends never count, anything else amiss is named, tails are cheap."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.output import journal
from pipeline.output.journal import Closed, Commit, Header, JournalWriter, Totals, UnitRows, read, read_tail

HEADER = Header("w0-00000", "w0", "w0", "f", "s", 100, "00", 1.0, 2.0, 5.0)


def commit(seq: int, rows: int = 2, units: int = 1) -> Commit:
    touched = tuple(UnitRows(unit, rows, 0, 0) for unit in range(units))
    totals = Totals(rows=rows * (seq + 1), completion_tokens=10 * (seq + 1))
    return Commit(seq, 200 + seq * 100, rows, "ab", touched, totals, float(seq))


def write(path: Path, *entries: journal.Entry) -> Path:
    path.write_bytes(b"".join(journal.encode(entry) for entry in entries))
    return path


def test_entries_come_back_as_they_were_written(tmp_path):
    writer = JournalWriter(tmp_path / "a.jsonl", HEADER)
    entries = [commit(0), commit(1, units=3), Closed(308, 9.0)]
    for entry in entries:
        writer.append(entry)
    writer.close()
    assert list(read(tmp_path / "a.jsonl")) == [HEADER, *entries]


def test_a_journal_is_never_taken_over(tmp_path):
    JournalWriter(tmp_path / "a.jsonl", HEADER).close()
    with pytest.raises(FileExistsError):
        JournalWriter(tmp_path / "a.jsonl", HEADER)


def test_every_cut_of_the_last_line_takes_away_that_line_only(tmp_path):
    path = write(tmp_path / "a.jsonl", HEADER, commit(0), commit(1))
    whole = path.read_bytes()
    length = len(journal.encode(commit(1)))
    for cut in range(1, length + 1):
        path.write_bytes(whole[:-cut])
        assert list(read(path)) == [HEADER, commit(0)], cut


def test_a_torn_header_is_an_empty_journal(tmp_path):
    path = write(tmp_path / "a.jsonl", HEADER)
    path.write_bytes(path.read_bytes()[:-1])
    assert list(read(path)) == []
    assert read_tail(path) is None


def test_a_header_whose_end_alone_came_to_disk_is_torn_too(tmp_path):
    path = write(tmp_path / "a.jsonl", HEADER)
    whole = path.read_bytes()
    path.write_bytes(bytes(40) + whole[40:])
    assert list(read(path)) == []
    assert read_tail(path) is None


def test_zeros_that_a_power_cut_left_at_the_end_do_not_count(tmp_path):
    path = write(tmp_path / "a.jsonl", HEADER, commit(0))
    whole = path.read_bytes()
    line = journal.encode(commit(1))
    for tail in (bytes(50), bytes(20) + line[20:]):
        path.write_bytes(whole + tail)
        assert list(read(path)) == [HEADER, commit(0)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[0], b"{not json}\n", lines[2]],
        lambda lines: [lines[0], lines[1].replace(b'"rows":2', b'"rows":-2'), lines[2]],
        lambda lines: [lines[0], lines[1].replace(b'"sha256"', b'"sha257"'), lines[2]],
        lambda lines: [lines[0], b"[]\n", lines[2]],
        lambda lines: [lines[0], lines[2]],
        lambda lines: [lines[0], lines[0], lines[2]],
        lambda lines: [lines[0], lines[1].replace(b'"offset":200', b'"offset":90'), lines[2]],
    ],
)
def test_damage_inside_is_named_with_file_and_line(tmp_path, damage):
    path = write(tmp_path / "a.jsonl", HEADER, commit(0), commit(1))
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2"):
        list(read(path))


def test_a_tail_knows_the_totals_of_a_long_journal(tmp_path):
    commits = [commit(seq) for seq in range(3000)]
    path = write(tmp_path / "a.jsonl", HEADER, *commits)
    assert path.stat().st_size > 4 * journal._TAIL_BYTES
    tail = read_tail(path)
    assert tail is not None
    assert tail.header == HEADER and tail.closed is None
    assert tail.totals == commits[-1].totals
    assert 10 < len(tail.commits) < 1000
    assert tail.commits == tuple(commits[-len(tail.commits) :])


def test_a_tail_finds_a_last_line_longer_than_itself(tmp_path):
    path = write(tmp_path / "a.jsonl", HEADER, commit(0), commit(1, units=20_000))
    tail = read_tail(path)
    assert tail is not None and tail.totals == commit(1).totals


def test_a_short_tail_is_the_whole_journal(tmp_path):
    tail = read_tail(write(tmp_path / "a.jsonl", HEADER, commit(0), Closed(300, 3.0)))
    assert tail is not None
    assert tail.commits == (commit(0),) and tail.closed == Closed(300, 3.0)
