"""Records and liveness, on clocks that the tests turn."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time

import pytest
from fake_jobs import gone

from pipeline.cluster.heartbeat import Heartbeat
from pipeline.cluster.processes import Process, SlurmTask
from pipeline.cluster.watch import Liveness, Watch
from pipeline.cluster.workers import Member, WorkerRecord, read_record
from pipeline.output.layout import record_path
from pipeline.store import FileStore


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


ELSEWHERE = Process("another-host", 5, "boot", "pid:[1]", 7)


def member(tmp_path, name: str, process=ELSEWHERE, slurm=None, clock=time.monotonic, **options) -> Member:
    made = Member(
        FileStore(), tmp_path, name, process, slurm, incarnation=f"{name}.1", clock=clock, **options
    )
    made.join()
    return made


def me_here(tmp_path, **options) -> Member:
    return member(tmp_path, "me", Process.current(), **options)


def watch(tmp_path, me: Member, clock) -> Watch:
    return Watch(FileStore(), tmp_path, me, lease_s=60.0, clock=clock)


def test_a_record_comes_back_as_it_was_written(tmp_path):
    slurm = SlurmTask("77", 3, 1, 0.25)
    made = member(tmp_path, "w", Process.current(), slurm, gpu_hour_usd=2.5)
    made.note_loaded()
    made.note_work(rows=5, tokens=70, busy_s=1.5)
    assert made.beat([(8, True), (9, False)])
    record = read_record(FileStore(), tmp_path, "w.1")
    assert record == made.record and record.counter == 1
    assert (record.held, record.rows, record.tokens) == (((8, True), (9, False)), 5, 70)
    assert WorkerRecord.decode(record.encode()) == record


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"worker": 1}'])
def test_a_damaged_record_is_none(tmp_path, data):
    member(tmp_path, "w")
    record_path(tmp_path, "w.1").write_bytes(data)
    assert read_record(FileStore(), tmp_path, "w.1") is None


def test_a_worker_is_alive_while_its_counter_moves_whatever_the_hour(tmp_path):
    clock = Clock()
    # its wall clock runs backwards, and nobody minds
    hours = iter(range(10_000, 0, -1))
    other = member(tmp_path, "other", wall=lambda: float(next(hours)))
    me = watch(tmp_path, me_here(tmp_path), clock)
    assert me.look("other.1")[0] is Liveness.unknown
    clock.now += 59
    assert me.look("other.1")[0] is Liveness.unknown
    other.beat()
    assert me.look("other.1")[0] is Liveness.alive
    assert me.moved_since("other.1", clock.now) and not me.moved_since("other.1", clock.now + 1)
    clock.now += 60
    assert me.look("other.1")[0] is Liveness.alive
    clock.now += 1
    assert me.look("other.1")[0] is Liveness.dead
    # stopped and continued: it is back
    other.beat()
    assert me.look("other.1")[0] is Liveness.alive


def test_standstill_is_timed_from_the_first_look_on(tmp_path):
    """However old a record is: the observer's own clock decides."""
    clock = Clock()
    member(tmp_path, "other", wall=lambda: 1.0)
    clock.now += 1e6
    me = watch(tmp_path, me_here(tmp_path), clock)
    assert me.look("other.1")[0] is Liveness.unknown
    clock.now += 61
    assert me.look("other.1")[0] is Liveness.dead


def test_a_worker_without_a_record_is_dead_only_in_time(tmp_path):
    clock = Clock()
    me = watch(tmp_path, me_here(tmp_path), clock)
    assert me.look("lost.1") == (Liveness.unknown, None)
    clock.now += 61
    assert me.look("lost.1") == (Liveness.dead, None)


def test_who_left_is_dead_at_once(tmp_path):
    other = member(tmp_path, "other")
    me = watch(tmp_path, me_here(tmp_path), Clock())
    other.beat([(3, True)])
    other.leave("SIGTERM")
    liveness, record = me.look("other.1")
    assert liveness is Liveness.dead
    assert (record.ended, record.held) == ("SIGTERM", ())
    assert not other.beat([(3, True)])
    assert read_record(FileStore(), tmp_path, "other.1").ended == "SIGTERM"


def test_a_process_of_this_machine_that_is_gone_is_dead_at_once(tmp_path):
    me = watch(tmp_path, me_here(tmp_path), Clock())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        start = int(open(f"/proc/{child.pid}/stat").read().rpartition(")")[2].split()[19])
        process = dataclasses.replace(Process.current(), pid=child.pid, start_time=start)
        member(tmp_path, "child", process)
        member(tmp_path, "namesake", dataclasses.replace(process, start_time=start - 1))
        member(tmp_path, "elsewhere", dataclasses.replace(process, host="x", pid=2**22 + 1))
        member(tmp_path, "unknown", dataclasses.replace(process, boot_id=None, pid=2**22 + 1))
        assert me.look("child.1")[0] is Liveness.unknown
        assert me.look("namesake.1")[0] is Liveness.dead
        assert me.look("elsewhere.1")[0] is Liveness.unknown
        assert me.look("unknown.1")[0] is Liveness.unknown
        os.kill(child.pid, 9)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        # killed and not yet waited for by its parent
        assert me.look("child.1")[0] is Liveness.dead
    assert me.look("child.1")[0] is Liveness.dead


@pytest.mark.parametrize(
    ("theirs", "dead"),
    [
        (SlurmTask("77", 3, 0, 0.0), True),
        (SlurmTask("77", 3, 1, 0.0), False),
        (SlurmTask("77", 3, 2, 0.0), False),
        (SlurmTask("77", 4, 0, 0.0), False),
        (SlurmTask("78", 3, 0, 0.0), False),
        (None, False),
    ],
)
def test_an_earlier_life_of_ones_own_task_is_dead_at_once(tmp_path, theirs, dead):
    member(tmp_path, "other", slurm=theirs)
    me = watch(tmp_path, me_here(tmp_path, slurm=SlurmTask("77", 3, 1, 0.0)), Clock())
    assert (me.look("other.1")[0] is Liveness.dead) == dead


def test_what_slurm_tells_its_tasks():
    assert SlurmTask.from_environment({}) is None
    assert SlurmTask.from_environment({"SLURM_JOB_ID": "5"}) == SlurmTask("5", None, 0, None)
    array = {
        "SLURM_JOB_ID": "90",
        "SLURM_ARRAY_JOB_ID": "88",
        "SLURM_ARRAY_TASK_ID": "6",
        "SLURM_ARRAY_TASK_MIN": "4",
        "SLURM_ARRAY_TASK_MAX": "11",
        "SLURM_RESTART_COUNT": "2",
    }
    assert SlurmTask.from_environment(array) == SlurmTask("88", 6, 2, 0.25)


def test_a_stalled_engine_gives_no_sign_of_life(tmp_path):
    clock = Clock()
    stalled = member(tmp_path, "w", clock=clock, stall_s=600.0)
    clock.now += 600
    assert stalled.beat()
    clock.now += 1
    assert not stalled.beat() and stalled.record.counter == 1
    stalled.tick()
    assert stalled.beat() and stalled.record.counter == 2


def test_alone_is_who_knows_that_all_others_are_dead(tmp_path):
    clock = Clock()
    me = watch(tmp_path, me_here(tmp_path), clock)
    member(tmp_path, "killed", gone())
    assert me.is_alone()
    other = member(tmp_path, "other")
    assert not me.is_alone()
    other.leave("done")
    assert me.is_alone()


def test_the_thread_beats_hurries_and_leaves(tmp_path):
    worker = member(tmp_path, "w")
    held = [(4, False)]
    with Heartbeat(worker, lambda: held, interval_s=30.0):
        wait_for(lambda: worker.record.counter == 1)
        held[0] = (4, True)
        worker.news.set()
        wait_for(lambda: worker.record.held == ((4, True),))
        assert worker.record.counter == 2
    assert read_record(FileStore(), tmp_path, "w.1").ended == "done"
    broken = member(tmp_path, "broken")
    with pytest.raises(RuntimeError), Heartbeat(broken, list, interval_s=30.0):
        raise RuntimeError
    assert read_record(FileStore(), tmp_path, "broken.1").ended == "RuntimeError"


def test_a_beat_that_cannot_be_written_ends_nothing(tmp_path, monkeypatch):
    worker = member(tmp_path, "w")
    real, failures = FileStore.replace, iter([OSError("full")] * 2)

    def replace(store, path, data):
        error = next(failures, None)
        if error is not None:
            raise error
        real(store, path, data)

    monkeypatch.setattr(FileStore, "replace", replace)
    with Heartbeat(worker, list, interval_s=0.01):
        wait_for(lambda: (read_record(FileStore(), tmp_path, "w.1") or worker.record).counter >= 4)


def wait_for(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
