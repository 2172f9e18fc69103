"""How a process becomes a worker on a job's directory.

Knows: the order of it: first the others can see this process, then it looks at the job, then at the units.
Refuses to know: what the job is made of.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from pipeline import durable
from pipeline.cluster.claims import Claims
from pipeline.cluster.processes import Process, SlurmTask
from pipeline.cluster.time_limit import TimeLimit
from pipeline.cluster.watch import Watch
from pipeline.cluster.workers import Member
from pipeline.config import JobConfig
from pipeline.input.source import InputIndex
from pipeline.output.plan import JobPlan
from pipeline.output.progress import JobDirectory
from pipeline.store import open_store, require_exclusive_names


@dataclass(frozen=True)
class Place:
    """A worker's place in a job."""

    directory: JobDirectory
    member: Member
    claims: Claims
    limit: TimeLimit


def join(config: JobConfig, worker: str, started: float, plan: JobPlan, index: InputIndex) -> Place:
    """Makes the job's directory, or goes on with it, as one of its workers.

    worker: a name that is kept over restarts. started: since when this process costs money, as time.time
    tells. Raises ValueError if the directory holds another job, FullDisk, OSError.
    """
    path, cluster = Path(config.output.dir), config.cluster
    store = open_store(path, config.output.storage_options, config.output.stage_dir)
    slurm = SlurmTask.from_environment(os.environ)
    with durable.full_disk_named(path):
        store.make_folder(path)
        require_exclusive_names(store, path)
        member = Member(
            store,
            path,
            worker,
            Process.current(),
            slurm,
            gpu_hour_usd=config.cost.gpu_hour_usd,
            stall_s=cluster.stall_s,
            started=started,
        )
        watch = Watch(store, path, member, cluster.lease_s)
        # before the job is looked at: whoever wants the directory for another one must see that it is in use
        member.join()
        try:
            directory = JobDirectory.open(path, plan, index, watch.is_alone, store)
            limit = TimeLimit.of(cluster.time_limit_s, time.time() - started, os.environ)
            claims = Claims(
                directory,
                member,
                watch,
                retry_errors=config.output.retry_errors,
                hint=None if slurm is None else slurm.place,
                limit=limit,
                poll_s=cluster.poll_s,
            )
        except BaseException:
            with contextlib.suppress(OSError):
                member.leave("refused")
            raise
    return Place(directory, member, claims, limit)
