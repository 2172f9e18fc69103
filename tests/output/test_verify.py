"""Verify: whatever hand or disk touches, it ends with 1 and says where."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_jobs import FakeSource, Run, plan

from pipeline import verify as command
from pipeline.config import OutputConfig, ParquetSource
from pipeline.input.source import open_source
from pipeline.output.dataset import DatasetFormat
from pipeline.output.dataset_check import first_difference
from pipeline.output.finalize import finalize
from pipeline.output.journal import read
from pipeline.output.layout import journal_path, part_path
from pipeline.output.plan import JobPlan
from pipeline.output.progress import JobDirectory
from pipeline.output.reader import open_parts
from pipeline.output.verify import verify


@pytest.fixture
def job(tmp_path) -> Run:
    source = FakeSource()
    made = Run(tmp_path / "job", source, plan(source, samples=2, completion_ids=True), commit_every=10)
    made.start(stop_after=35)
    made.start()
    assert verify(made.path, source).complete
    return made


def problems(job: Run) -> str:
    verdict = verify(job.path, job.source)
    assert not verdict.complete
    assert verdict.num_problems >= len(verdict.problems) > 0
    return "\n".join(verdict.problems)


def rewrite(job: Run, change, name: str = "w0-00000") -> None:
    """A forger's part: the rows changed, every hash, offset and count in the journal made to fit."""
    schema = pa.ipc.open_stream(part_path(job.path, name).read_bytes()).schema
    batches = list(read_batches(job, name))
    entries = [json.loads(line) for line in journal_path(job.path, name).read_bytes().splitlines()]
    data = schema.serialize().to_pybytes()
    prompt = completion = rows = 0
    for entry, batch in zip([e for e in entries if e["kind"] == "commit"], change(batches), strict=True):
        message = batch.serialize().to_pybytes()
        data += message
        prompt += sum(batch.column("prompt_tokens").to_pylist())
        completion += sum(batch.column("completion_tokens").to_pylist())
        rows += batch.num_rows
        entry.update(offset=len(data), rows=batch.num_rows, sha256=hashlib.sha256(message).hexdigest())
        skipped = entry["totals"]["skipped"]
        entry["totals"].update(rows=rows, prompt_tokens=prompt, completion_tokens=completion, skipped=skipped)
    part_path(job.path, name).write_bytes(data)
    lines = [json.dumps(entry) for entry in entries if entry["kind"] != "closed"]
    journal_path(job.path, name).write_text("\n".join(lines) + "\n")


def read_batches(job: Run, name: str):
    parts = open_parts(job.path)
    numbers = [part.header.part for part in parts.ledger.parts]
    for ref, batch in zip(parts.ledger.all_commits(), parts, strict=True):
        if numbers[ref.part] == name:
            yield batch


def replace(batch: pa.RecordBatch, row: int, column: str, value: object) -> pa.RecordBatch:
    rows = batch.to_pylist()
    rows[row][column] = value
    return pa.RecordBatch.from_pylist(rows, schema=batch.schema)


def test_what_is_counted(job):
    verdict = verify(job.path, job.source)
    assert (verdict.num_results, verdict.num_errors, verdict.num_skipped) == (64, 0, 4)
    assert not verdict.has_dataset


def test_an_unfinished_job_lacks_rows(tmp_path):
    source = FakeSource()
    unfinished = Run(tmp_path / "job", source, plan(source), commit_every=1)
    unfinished.start(stop_after=26)
    text = problems(unfinished)
    assert "row 1 of file 1 (part-1.parquet), sample 0 is missing" in text
    assert verify(unfinished.path, source).num_problems == 6


def test_a_single_flipped_bit_is_found(job):
    path = part_path(job.path, "w0-00000")
    data = path.read_bytes()
    place = data.index(b"said RowKey")
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    assert "w0-00000.arrow was altered: bytes" in problems(job)


@pytest.mark.parametrize("keep", [0.0, 0.2, 0.9])
def test_a_truncated_part_is_found(job, keep):
    path = part_path(job.path, "w1-00000")
    os.truncate(path, int(path.stat().st_size * keep))
    assert "w1-00000.arrow is cut off at byte" in problems(job)


def test_a_closed_part_that_goes_on_is_found(job):
    with open(part_path(job.path, "w1-00000"), "ab") as file:
        file.write(b"more")
    assert "w1-00000.arrow was closed at byte" in problems(job)


def test_a_missing_part_is_found(job):
    part_path(job.path, "w1-00000").unlink()
    assert "w1-00000.arrow is missing" in problems(job)


def test_a_missing_journal_is_found(job):
    journal_path(job.path, "w1-00000").unlink()
    text = problems(job)
    assert "w1-00000.jsonl is missing, and part w1-00000 holds rows" in text
    assert "row 15 of file 0 (part-0.parquet), sample 0 is missing" in text


def test_a_part_missing_with_its_journal_is_found_by_its_rows(job):
    part_path(job.path, "w1-00000").unlink()
    journal_path(job.path, "w1-00000").unlink()
    assert "row 15 of file 0 (part-0.parquet), sample 0 is missing" in problems(job)


def test_a_lost_line_of_a_journal_is_found(job):
    path = journal_path(job.path, "w0-00000")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1] + lines[2:]))
    assert "w0-00000.jsonl, line 2: does not follow" in problems(job)
    path.write_bytes(b"".join(lines[:-1]))
    assert "sample 0 is missing" in problems(job)


def test_a_dropped_row_is_found_though_all_else_fits(job):
    rewrite(job, lambda batches: [batches[0].slice(0, 9), *batches[1:]])
    text = problems(job)
    assert "row 4 of file 0 (part-0.parquet), sample 1 is missing" in text
    assert "part w0-00000, commit 0: holds (unit, rows, errors)" in text


def test_a_doubled_row_is_found_though_all_else_fits(job):
    def doubled(batches):
        table = pa.Table.from_batches([batches[0], batches[0].slice(3, 1)])
        return [table.combine_chunks().to_batches()[0], *batches[1:]]

    rewrite(job, doubled)
    assert "row 1 of file 0 (part-0.parquet), sample 1 is there again in part w0-00000" in problems(job)


def test_a_row_put_in_the_place_of_another_is_found(job):
    rewrite(job, lambda batches: [replace(batches[0], 4, "row", 1), *batches[1:]])
    text = problems(job)
    assert "row 2 of file 0 (part-0.parquet), sample 0 is missing" in text
    assert "row 1 of file 0 (part-0.parquet), sample 0 is there again" in text


def test_a_row_of_no_job_is_found(job):
    rewrite(job, lambda batches: [replace(batches[0], 4, "row", 999), *batches[1:]])
    assert "commit 0: row 999 of file 0, sample 0 does not belong to the job" in problems(job)
    rewrite(job, lambda batches: [replace(batches[0], 4, "sample", 2), *batches[1:]])
    assert "sample 2 does not belong to the job" in problems(job)


def test_an_altered_carried_value_is_found_though_all_else_fits(job):
    rewrite(job, lambda batches: [replace(batches[0], 3, "text", "forged"), *batches[1:]])
    assert "row 1 of file 0 (part-0.parquet), sample 1: column text differs" in problems(job)


def test_a_count_of_tokens_that_is_none_is_found(job):
    path = journal_path(job.path, "w0-00000")
    text = path.read_text()
    path.write_text(text.replace('"completion_tokens":', '"completion_tokens":1', 1))
    assert "part w0-00000, commit 0: holds Totals(" in problems(job)


def test_a_finish_reason_without_its_error_is_found(job):
    rewrite(job, lambda batches: [replace(batches[0], 3, "finish_reason", "eaten"), *batches[1:]])
    assert "commit 0: has a finish_reason that is none" in problems(job)
    rewrite(job, lambda batches: [replace(batches[0], 3, "finish_reason", "error"), *batches[1:]])
    assert "commit 0: has an error without finish_reason error" in problems(job)


def test_a_changed_source_value_is_found(job):
    job.source.altered[0, 17] = "changed later"
    text = problems(job)
    assert "row 17 of file 0 (part-0.parquet), sample 0: column text differs from the source's value" in text
    assert "column tags differs" in text


def test_a_changed_source_file_is_found(job):
    job.source.files = ((10, 10, 5), (8,))
    assert "source: the input changed" in problems(job)


def test_rows_of_a_shuffled_job_are_found_in_the_source(tmp_path):
    source = FakeSource(((50, 50),))
    shuffled = Run(tmp_path / "job", source, plan(source, shuffle=True, unit_rows=16))
    shuffled.start()
    assert verify(shuffled.path, source).complete
    source.altered[0, 33] = "changed later"
    assert "row 33 of file 0 (part-0.parquet), sample 0: column text" in problems(shuffled)


def forged(rows: list[dict], column: str, value: object) -> list[dict]:
    return [*rows[:9], {**rows[9], column: value}, *rows[10:]]


@pytest.mark.parametrize("form", [DatasetFormat.arrow, DatasetFormat.parquet])
@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda rows: rows[:20] + rows[21:], "row 20, column sample"),
        (lambda rows: rows[:20] + rows[19:], "row 20, column row"),
        (lambda rows: rows[:-1], "row 63, which is missing"),
        (lambda rows: [*rows, rows[-1]], "row 64, which should not be there"),
        (lambda rows: forged(rows, "completion", "x"), "row 9, column completion"),
        (lambda rows: forged(rows, "completion_ids", [1]), "row 9, column completion_ids"),
        (lambda rows: [], "row 0, which is missing"),
    ],
)
def test_a_finalised_dataset_altered_by_hand_is_found(job, form, change, place):
    path = finalize(job.path, form).files[0]
    assert verify(job.path, job.source).complete
    forge(path, form, change)
    assert f"({form.value}) differs from the parts in {place}" in problems(job)


def forge(path: Path, form: DatasetFormat, change) -> None:
    if form is DatasetFormat.parquet:
        table = pq.read_table(path)
        pq.write_table(pa.Table.from_pylist(change(table.to_pylist()), schema=table.schema), path)
        return
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(pa.Table.from_pylist(change(table.to_pylist()), schema=table.schema))


def test_a_dataset_without_one_of_its_files_is_found(job):
    path = finalize(job.path).files[0]
    path.unlink()
    assert "lacks" in problems(job) and "data-00000-of-00001.arrow" in problems(job)
    (job.path / "dataset" / "state.json").write_text("{")
    assert "state.json is damaged" in problems(job)
    (job.path / "dataset" / "state.json").unlink()
    assert "holds no dataset" in problems(job)


def test_a_dataset_cut_off_is_found(job):
    path = finalize(job.path).files[0]
    os.truncate(path, path.stat().st_size - 2000)
    assert "run finalize again" in problems(job)


def test_a_dataset_older_than_the_rows_is_found(tmp_path):
    source = FakeSource()
    failing = Run(tmp_path / "job", source, plan(source), failing=lambda ordinal: ordinal == 3)
    failing.start()
    finalize(failing.path)
    failing.failing, failing.retry_errors = (lambda ordinal: False), True
    failing.start()
    assert "differs from the parts in row 3" in problems(failing)


def test_a_list_of_many_problems_is_cut_and_counted(tmp_path):
    source = FakeSource(((2000,),))
    unfinished = Run(tmp_path / "job", source, plan(source, unit_rows=10), commit_every=1)
    unfinished.start(stop_after=1)
    verdict = verify(unfinished.path, source)
    assert len(verdict.problems) == 50 < verdict.num_problems


def test_a_thousand_units_take_seconds(tmp_path):
    source = FakeSource(((5000,) * 4,))
    big = Run(tmp_path / "job", source, plan(source, unit_rows=20), commit_every=1000)
    big.start()
    begin = time.monotonic()
    finalize(big.path)
    assert verify(big.path, source).complete
    # about one second on one core
    assert time.monotonic() - begin < 15


def test_nan_equals_nan_and_nothing_else():
    nan = float("nan")
    assert first_difference(pa.array([1.0, nan, None]), pa.array([1.0, nan, None])) is None
    assert first_difference(pa.array([1.0, nan, None]), pa.array([1.0, nan, nan])) == 2
    assert first_difference(pa.array([1.0]), pa.array([1.0, 2.0])) == 1


def test_the_command_from_a_real_file_to_a_proof(tmp_path, capsys):
    """Parquet in, killed, resumed, verified by the command line alone; then one value of the file changes."""
    table = pa.table({"text": [f"t{i}" for i in range(50)], "n": pa.array(range(50), pa.int16())})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=20)
    config = ParquetSource(path=str(tmp_path / "in.parquet"), unit_rows=8)
    settled = JobPlan(config, OutputConfig(dir="x"), seed=0, samples=1, fingerprint={"seed": 0})
    job = Run(tmp_path / "job", open_source(config), settled)
    job.start(stop_after=20)
    assert command.main([str(job.path)]) == 1
    assert "NOT complete" in capsys.readouterr().out
    job.source = open_source(config, JobDirectory.stored_index(job.path))
    job.start()
    finalize(job.path)
    assert command.main([str(job.path)]) == 0
    assert "complete: 50 results (0 errors, 4 skipped), finalised dataset equal" in capsys.readouterr().out
    changed = table.set_column(0, "text", pa.array(["X" if i == 31 else f"t{i}" for i in range(50)]))
    pq.write_table(changed, tmp_path / "in.parquet", row_group_size=20)
    assert command.main([str(job.path)]) == 1
    assert "row 31 of file 0" in capsys.readouterr().out
    (tmp_path / "in.parquet").unlink()
    assert command.main([str(job.path)]) == 1
    assert "in.parquet" in capsys.readouterr().out
    assert command.main([str(tmp_path / "nothing")]) == 1


def test_the_journals_of_a_job_hold_one_header_each(job):
    kinds = [type(entry).__name__ for entry in read(journal_path(job.path, "w1-00000"))]
    assert kinds == ["Header", "Commit", "Commit", "Commit", "Commit", "Closed"]
