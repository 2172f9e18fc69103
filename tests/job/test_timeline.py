"""A job tells where its time went, and writes the window of steps that it was asked for."""

from __future__ import annotations

import re

from real_jobs import OWN_JOB, CommandServer, write_questions

from pipeline.report.trace import read_trace


def test_a_job_reports_its_time_and_its_timeline(commands: CommandServer, tmp_path) -> None:
    write_questions(tmp_path / "q.parquet", 20)
    job = (*OWN_JOB, "source.path=q.parquet", "prompt.column=question", "output.dir=out")
    window = (
        "engine.mode=async",
        "engine.timeline=true",
        "engine.timeline_after=2",
        "engine.timeline_steps=3",
    )
    ended = commands.run(*job, *window, "sampling.max_tokens=16", "sampling.ignore_eos=true", cwd=tmp_path)
    assert ended.code == 0, ended.err
    (trace,) = (tmp_path / "out" / "timeline").glob("*.json")
    timeline = read_trace(trace)
    assert timeline.mode == "async" and [span.step for span in timeline.compute] == [2, 3, 4]
    assert f"out/timeline/{trace.stem}" in ended.out

    assert re.search(
        r"^ready after [\d.]+ s \(imports .*, preparation .*, model .*, engine ", ended.err, re.M
    )
    lines = dict(re.findall(r"^(\S+) +(.+)$", ended.out, re.M))
    assert re.fullmatch(r"16, [\d.]+% of generating, [\d.]+ ms each", lines["steps"])
    assert re.fullmatch(r"[\d.]+ ms a step \(.*\); wait [\d.]+, consumer [\d.]+", lines["host"])
    assert lines["start-up"] in ended.err

    # It is the same job without, and one that has nothing left to do has no engine to speak of.
    ended = commands.run(*job, "sampling.max_tokens=16", "sampling.ignore_eos=true", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "none to do" in ended.out and "host" not in ended.out
    assert commands.run("out", cwd=tmp_path, verb="verify").code == 0
