"""Several workers on one directory, in one thread, on one clock: each row counts once, whoever dies when."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fake_jobs import FakeSource, Worker, complete, gone, plan

from pipeline.cluster.claims import Claim, Verdict
from pipeline.cluster.processes import Process
from pipeline.cluster.time_limit import TimeLimit
from pipeline.input.rows import Row, RowReader
from pipeline.output.chains import Leases
from pipeline.output.progress import JobDirectory
from pipeline.output.reader import open_parts
from pipeline.output.verify import verify
from pipeline.request import Request


class Cluster:
    """A job of 32 rows in units of 4, and its workers on one clock."""

    def __init__(self, path: Path, files=((10, 10, 5), (7,)), samples: int = 1, **options) -> None:
        self.now = 1000.0
        self.path = path
        self.source = FakeSource(files)
        self.plan = plan(self.source, samples=samples, **options)
        self.failing = lambda ordinal: False
        self.made: Counter[tuple[int, int]] = Counter()

    def worker(self, name: str, process: Process | None = None, **options) -> Worker:
        """On a machine of its own, so that only its silence tells, unless a process is given."""
        process = process or Process(f"host-of-{name}", 5, "boot", "pid:[1]", 7)
        directory = JobDirectory.open(self.path, self.plan, self.source.scan())
        return Worker.on(directory, self.source, name, process, clock=lambda: self.now, **options)

    def leases(self) -> Leases:
        return Leases(JobDirectory.load(self.path).store, self.path)

    def admit(self, worker: Worker, claim: Claim, num_rows: int | None = None) -> list[tuple]:
        """Lets the first rows of a claim into the engine; those that it takes."""
        rows = [row for wanted in claim.ranges() for row in reader_of(worker).rows(wanted)][:num_rows]
        pairs = [(row, sample) for row in rows for sample in claim.samples(row)]
        return [(row, sample) for row, sample in pairs if worker.claims.admit(request_of(row), sample)]

    def finish(self, worker: Worker, pairs: list[tuple]) -> int:
        """Ends sequences; how many of them were kept."""
        kept = [pair for pair in pairs if worker.writer.append(complete(*pair, self.failing))]
        self.made.update((row.ordinal, sample) for row, sample in kept)
        return len(kept)

    def work(self, worker: Worker, claim: Claim, num_rows: int | None = None) -> int:
        """Admits, ends and commits."""
        kept = self.finish(worker, self.admit(worker, claim, num_rows))
        worker.writer.commit()
        return kept

    def work_to_the_end(self, worker: Worker) -> Verdict:
        for _ in range(1000):
            step = worker.claims.advance()
            if isinstance(step, Claim):
                self.work(worker, step)
            elif step is Verdict.wait:
                self.now += 1.0
            else:
                worker.writer.close()
                return step
        raise AssertionError("no end")

    def assert_complete(self) -> None:
        verdict = verify(self.path, self.source)
        assert verdict.complete, verdict.problems
        table = open_parts(self.path).to_table()
        directory = JobDirectory.load(self.path)
        keys = set(zip(*(table.column(name).to_pylist() for name in ("file", "row", "sample")), strict=True))
        assert len(keys) == table.num_rows == open_parts(self.path).num_rows == directory.num_results


def reader_of(worker: Worker) -> RowReader:
    return RowReader(worker.source, worker.directory.order, worker.directory.index.schema.names)


def request_of(row: Row) -> Request:
    return complete(row, 0).request


def blind(worker: Worker) -> None:
    """It is told of no takeover: the disk answered a moment too early, the commit came too late."""
    worker.claims._is_taken_over = lambda unit, fence: False


def seeing(worker: Worker) -> None:
    worker.claims.__dict__.pop("_is_taken_over", None)


@pytest.fixture
def cluster(tmp_path) -> Cluster:
    return Cluster(tmp_path / "job")


def claim(worker: Worker) -> Claim:
    step = worker.claims.advance()
    assert isinstance(step, Claim), step
    return step


def units(*claims: Claim) -> list[int]:
    return [one.unit.number for one in claims]


def test_one_worker_goes_through_the_list(cluster):
    alone = cluster.worker("a")
    claims = [claim(alone) for _ in range(8)]
    assert units(*claims) == list(range(8))
    assert alone.claims.advance() is Verdict.wait
    for one in claims:
        cluster.work(alone, one)
    assert alone.claims.advance() is Verdict.complete
    alone.writer.close()
    assert set(cluster.made.values()) == {1}
    cluster.assert_complete()


def test_two_workers_share_the_list_and_leave_the_rest_to_each_other(cluster):
    first, second = cluster.worker("a"), cluster.worker("b")
    mine = [claim(first), claim(first)]
    others = [claim(second), claim(second)]
    assert units(*mine) == [0, 1] and units(*others) == [5, 6]
    while isinstance(step := first.claims.advance(), Claim):
        mine.append(step)
    for one in mine:
        cluster.work(first, one)
    # the other holds two units; that it lives must be seen before one may leave
    assert first.claims.advance() is Verdict.wait
    cluster.now += 2
    assert first.claims.advance() is Verdict.wait
    second.member.beat([(5, True), (6, True)])
    cluster.now += 2
    assert first.claims.advance() is Verdict.with_others
    assert first.claims.others.workers == {"b"}
    for one in others:
        cluster.work(second, one)
    assert cluster.work_to_the_end(second) is Verdict.complete
    first.writer.close()
    cluster.assert_complete()


def test_what_is_finished_is_shown_before_the_rest_is_left_to_others(cluster):
    """Else all could leave at once, each for the others' sake, and nobody would see the job complete."""
    first, second = cluster.worker("a"), cluster.worker("b")
    held = [(worker, [claim(worker) for _ in range(4)]) for worker in (first, second)]
    for worker, claims in held:
        for one in claims:
            cluster.finish(worker, cluster.admit(worker, one))
        worker.claims.advance()
    for _ in range(3):
        cluster.now += 2
        second.member.beat()
        assert first.claims.advance() is Verdict.wait and first.claims.wants_commit
    first.writer.commit()
    second.member.beat()
    assert first.claims.advance() is Verdict.with_others
    cluster.now += 2
    assert second.claims.advance() is Verdict.complete
    second.writer.close()
    first.writer.close()
    cluster.assert_complete()


def test_committed_rows_of_the_dead_are_not_made_again(cluster):
    dead, heir = cluster.worker("dead"), cluster.worker("heir")
    cluster.work(dead, claim(dead), num_rows=3)
    assert cluster.work_to_the_end(heir) is Verdict.complete
    # one row was missing; it was looked for only when the holder had been silent for a minute
    assert set(cluster.made.values()) == {1} and cluster.now > 1060
    assert cluster.leases().fences(8).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    cluster.assert_complete()


def test_the_dead_of_this_machine_are_inherited_at_once(cluster):
    dead = cluster.worker("dead", process=gone())
    cluster.work(dead, claim(dead), num_rows=2)
    heir = cluster.worker("heir")
    begun = cluster.now
    assert cluster.work_to_the_end(cluster.worker("here", Process.current())) is Verdict.complete
    assert cluster.now == begun
    assert heir.claims.advance() is Verdict.complete


def test_what_a_zombie_appends_after_its_unit_was_taken_over_is_void(cluster):
    zombie, heir = cluster.worker("zombie"), cluster.worker("heir")
    held = claim(zombie)
    in_flight = cluster.admit(zombie, held)
    cluster.finish(zombie, in_flight[:2])
    zombie.writer.commit()
    cluster.finish(zombie, in_flight[2:])
    assert cluster.work_to_the_end(heir) is Verdict.complete
    # it comes back and commits without asking, as if the question had been answered a moment too early
    blind(zombie)
    zombie.writer.close()
    ledger = JobDirectory.load(cluster.path).stored().ledger
    assert ledger.num_commits > len(ledger.commits(0)) == 2
    assert cluster.made[2, 0] == cluster.made[3, 0] == 2
    cluster.assert_complete()


def test_a_zombie_notices_what_it_lost_before_it_writes(cluster):
    zombie, heir = cluster.worker("zombie"), cluster.worker("heir")
    held, other = claim(zombie), claim(zombie)
    begun = cluster.admit(zombie, held, num_rows=2)
    assert cluster.work_to_the_end(heir) is Verdict.complete
    # rows that the engine had let in are dropped with the commit, rows that waited are not let in
    assert cluster.finish(zombie, begun) == 2
    zombie.writer.close()
    assert zombie.writer.num_committed == 0
    assert cluster.admit(zombie, held) == cluster.admit(zombie, other) == []
    assert zombie.claims.held() == []
    assert zombie.claims.advance() is Verdict.complete
    cluster.assert_complete()


def test_a_zombie_that_outlives_its_heir_goes_on_where_that_ended(cluster):
    """The unit goes from a to b and back to a: what a wrote in between counts under neither of its leases."""
    zombie, heir = cluster.worker("zombie"), cluster.worker("heir")
    held = claim(zombie)
    in_flight = cluster.admit(zombie, held)
    cluster.finish(zombie, in_flight[:1])
    zombie.writer.commit()
    for _ in range(7):
        cluster.work(heir, claim(heir))
    assert heir.claims.advance() is Verdict.wait
    cluster.now += 61
    taken = claim(heir)
    assert units(taken) == [0] and taken.ranges() == [range(1, 4)]
    cluster.work(heir, taken, num_rows=1)
    # rows of the unit, committed blindly, and one in flight from before
    blind(zombie)
    cluster.finish(zombie, in_flight[2:3])
    zombie.writer.commit()
    seeing(zombie)
    cluster.finish(zombie, in_flight[1:2])
    zombie.writer.commit()
    cluster.now += 1
    assert zombie.claims.advance() is Verdict.wait
    cluster.now += 61
    again = claim(zombie)
    assert units(again) == [0] and again.ranges() == [range(2, 4)]
    # the one still in flight is as good as a new one; it counts once
    assert cluster.finish(zombie, in_flight[3:4]) == 1
    assert cluster.work(zombie, again) == 1
    assert cluster.work_to_the_end(zombie) is Verdict.complete
    cluster.assert_complete()


def test_a_unit_given_back_is_free_at_once_with_what_was_committed(cluster):
    giver, taker = cluster.worker("giver"), cluster.worker("taker")
    cluster.work(giver, claim(giver), num_rows=1)
    assert giver.claims.give_back(0) and not giver.claims.give_back(0)
    begun = cluster.now
    assert cluster.work_to_the_end(taker) is Verdict.complete
    assert cluster.now == begun and set(cluster.made.values()) == {1}
    giver.writer.close()
    cluster.assert_complete()


def test_who_left_frees_all_of_its_units_at_once(cluster):
    leaver, heir = cluster.worker("leaver"), cluster.worker("heir")
    claims = [claim(leaver) for _ in range(8)]
    cluster.work(leaver, claims[3], num_rows=2)
    leaver.writer.close()
    leaver.member.leave("SIGUSR1")
    begun = cluster.now
    assert cluster.work_to_the_end(heir) is Verdict.complete
    assert cluster.now == begun and set(cluster.made.values()) == {1}
    cluster.assert_complete()


def test_units_that_a_living_worker_has_not_begun_are_stolen(cluster):
    rich, poor = cluster.worker("rich"), cluster.worker("poor")
    claims = [claim(rich) for _ in range(8)]
    begun = cluster.admit(rich, claims[0], num_rows=2)
    rich.member.beat(rich.claims.held())
    stolen = claim(poor)
    assert units(stolen) == [7]
    # its rows still wait: no second one before they are in the engine
    cluster.now += 2
    assert poor.claims.advance() is Verdict.wait
    cluster.work(poor, stolen)
    cluster.now += 2
    assert units(claim(poor)) == [6]
    assert cluster.admit(rich, claims[7]) == cluster.admit(rich, claims[6]) == []
    assert [unit for unit, _ in rich.claims.held()] == [0, 1, 2, 3, 4, 5]
    # what was taken from it is not taken back while its new holder lives
    cluster.finish(rich, begun + cluster.admit(rich, claims[0])[2:])
    for one in claims[1:6]:
        cluster.work(rich, one)
    poor.member.beat(poor.claims.held())
    assert rich.claims.advance() is Verdict.wait
    assert cluster.leases().fences(8).tolist() == [0] * 6 + [1, 1]


def test_a_lone_survivor_finishes_everything(cluster):
    workers = [cluster.worker(f"w{number}") for number in range(4)]
    survivor = workers[2]
    for worker in workers:
        cluster.work(worker, claim(worker), num_rows=None if worker is survivor else 2)
        if worker is not survivor:
            claim(worker)
    assert cluster.work_to_the_end(survivor) is Verdict.complete
    assert set(cluster.made.values()) == {1}
    cluster.assert_complete()


def test_simultaneous_heirs_make_nothing_twice(cluster):
    dead = cluster.worker("dead")
    held = [claim(dead) for _ in range(8)]
    cluster.work(dead, held[0], num_rows=2)
    dead.member.leave("killed")
    heirs = [cluster.worker(f"heir{number}") for number in range(3)]
    # each has searched and knows the same eight units
    first = [claim(heir) for heir in heirs]
    assert len(set(units(*first))) == 3
    for heir, one in zip(heirs, first, strict=True):
        cluster.work(heir, one)
    for heir in heirs:
        cluster.work_to_the_end(heir)
    assert set(cluster.made.values()) == {1}
    cluster.assert_complete()


def test_errors_are_retried_once_per_start_by_whoever_comes_first(cluster):
    cluster.failing = lambda ordinal: ordinal in (2, 5, 6, 31)
    assert cluster.work_to_the_end(cluster.worker("first")) is Verdict.complete
    assert cluster.work_to_the_end(cluster.worker("plain")) is Verdict.complete
    cluster.failing = lambda ordinal: ordinal == 5
    retriers = [cluster.worker(f"retrier{number}", retry_errors=True) for number in range(2)]
    assert retriers[0].claims.count_missing() == 4
    taken = [claim(retriers[0]), claim(retriers[1])]
    assert [one.ranges() for one in taken] == [[range(2, 3)], [range(5, 7)]]
    for retrier, one in zip(retriers, taken, strict=True):
        cluster.work(retrier, one)
    for retrier in retriers:
        cluster.work_to_the_end(retrier)
    assert {key for key, count in cluster.made.items() if count == 2} == {(o, 0) for o in (2, 5, 6, 31)}
    assert max(cluster.made.values()) == 2
    cluster.assert_complete()
    assert verify(cluster.path, cluster.source).num_errors == 1


def test_a_retry_that_ends_halfway_voids_only_what_it_made(cluster):
    cluster.failing = lambda ordinal: ordinal < 4
    cluster.work_to_the_end(cluster.worker("first"))
    cluster.failing = lambda ordinal: False
    retrier = cluster.worker("retrier", retry_errors=True)
    cluster.work(retrier, claim(retrier), num_rows=2)
    retrier.member.leave("killed")
    assert verify(cluster.path, cluster.source).num_errors == 2
    cluster.assert_complete()
    cluster.work_to_the_end(cluster.worker("again", retry_errors=True))
    assert verify(cluster.path, cluster.source).num_errors == 0
    cluster.assert_complete()


def test_near_the_time_limit_no_unit_is_taken_that_cannot_be_finished(cluster):
    limit = TimeLimit(1000.0 + 130.0, clock=lambda: cluster.now)
    worker = cluster.worker("a", limit=limit)
    first, second, third = (claim(worker) for _ in range(3))
    cluster.now += 40
    cluster.work(worker, first)
    # forty seconds a unit, and sixty are left before it is time to leave
    fourth = claim(worker)
    cluster.admit(worker, second)
    cluster.now += 30
    assert worker.claims.advance() is Verdict.no_time
    # those that were not begun are given back for others to begin at once
    assert worker.claims.held() == [(1, True)]
    assert cluster.admit(worker, third) == cluster.admit(worker, fourth) == []
    assert cluster.leases().lease(2, 1).incarnation is None
    assert not limit.is_over and limit.reason is not None
    cluster.now += 31
    assert limit.is_over


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_deaths_stalls_and_thefts_gives_each_row_once(tmp_path, seed):
    chance = random.Random(seed)
    cluster = Cluster(tmp_path / "job", samples=2, unit_rows=3)
    cluster.failing = lambda ordinal: ordinal % 9 == 4
    workers: dict[str, tuple[Worker, list]] = {}
    for step in range(150):
        cluster.now += chance.choice((0.1, 1.0, 5.0))
        if len(workers) < 3 or chance.random() < 0.02:
            name = f"w{step}"
            workers[name] = (cluster.worker(name, retry_errors=chance.random() < 0.3), [])
        name = chance.choice(sorted(workers))
        worker, in_flight = workers[name]
        action = chance.random()
        if action < 0.3 and isinstance(one := worker.claims.advance(), Claim):
            in_flight += cluster.admit(worker, one, num_rows=chance.choice((1, 2, None)))
        elif action < 0.65:
            done = [in_flight.pop(chance.randrange(len(in_flight))) for _ in range(min(3, len(in_flight)))]
            cluster.finish(worker, done)
        elif action < 0.8:
            if chance.random() < 0.3:
                # asked too early, written too late
                blind(worker)
            worker.writer.commit()
            seeing(worker)
        elif action < 0.95:
            worker.member.beat(worker.claims.held())
        elif action < 0.97:
            # silent for long enough to be taken for dead by all who look
            cluster.now += 100
        else:
            del workers[name]
    for worker, _ in workers.values():
        worker.writer.close()
    assert cluster.work_to_the_end(cluster.worker("last")) is Verdict.complete
    cluster.assert_complete()


def test_claims_of_a_unit_say_which_samples_are_missing(tmp_path):
    cluster = Cluster(tmp_path / "job", files=((4,),), samples=3)
    dead = cluster.worker("dead")
    pairs = cluster.admit(dead, claim(dead))
    cluster.finish(dead, [pairs[number] for number in (0, 1, 2, 4)])
    dead.writer.close()
    dead.member.leave("killed")
    taken = claim(cluster.worker("heir"))
    assert taken.ranges() == [range(1, 4)]
    assert np.flatnonzero(taken.missing.ravel()).tolist() == [3, 5, 6, 7, 8, 9, 10, 11]
