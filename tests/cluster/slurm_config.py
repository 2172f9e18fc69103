"""The files of a private Slurm cluster on one host: no services, cgroups or database; quick to schedule."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Sequence
from pathlib import Path

CONFIG = "slurm.conf"
NODES = ("n0", "n1", "n2", "n3")
_CPUS = 4
# Small, so that a job of a few workers already takes two arrays.
MAX_ARRAY_SIZE = 6
KILL_WAIT_S = 5

# AuthInfo: a requeued job is held for cred_expire + 1 seconds, 121 unless told otherwise. It needs the time:
# one that was started at once took its last life's end for its own. PlugStackConfig: else the host's.
# config_overrides: more CPUs than the host has. SlurmdTimeout: until a node is given up.
_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
PlugStackConfig={folder}/plugstack.conf
MailProg=/bin/true
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=1
PriorityType=priority/basic
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill_wait}
OverTimeLimit=0
BatchStartTimeout=10
MessageTimeout=10
SlurmctldTimeout=10
SlurmdTimeout=10
InactiveLimit=0
MinJobAge=600
ReturnToService=2
UnkillableStepTimeout=20
MaxArraySize={max_array_size}
AccountingStorageType=accounting_storage/none
"""


def write_files(folder: Path) -> None:
    """The folder's own: configuration, keys, and places for state, spool and logs."""
    folder.chmod(0o755)
    for name in ("log", "state", "munge", *(f"spool/{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o700)
    key = folder / "munge" / "key"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    (folder / "plugstack.conf").touch()
    host = socket.gethostname().split(".")[0]
    controller, *ports = _free_ports(1 + len(NODES))
    config = _CONFIG.format(
        host=host,
        port=controller,
        user=getpass.getuser(),
        folder=folder,
        kill_wait=KILL_WAIT_S,
        max_array_size=MAX_ARRAY_SIZE,
    )
    nodes = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={_CPUS} RealMemory=1000"
        for node, port in zip(NODES, ports, strict=True)
    ]
    everywhere = f"Nodes={','.join(NODES)} MaxTime=INFINITE State=UP"
    partitions = [
        f"PartitionName=main {everywhere} Default=YES PriorityTier=1 PreemptMode=REQUEUE",
        f"PartitionName=urgent {everywhere} PriorityTier=10 PreemptMode=OFF",
    ]
    (folder / CONFIG).write_text(config + "\n".join([*nodes, *partitions]) + "\n")


def _free_ports(count: int) -> Sequence[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
