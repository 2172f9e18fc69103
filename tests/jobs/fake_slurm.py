"""Slurm's and the launchers' commands as scripts that note what they are asked; a python that does no job.

Knows how the scripts in jobs/ are run; refuses to know what a test expects. No daemon is needed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOBS = Path(__file__).resolve().parent.parent.parent / "jobs"
_PATIENCE_S = 60.0
# Every command appends its words to calls.jsonl; what it answers is in the case.
_FAKE = """#!{python} -IS
import json, os, sys
folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
with open(folder + "/calls.jsonl", "a") as calls:
    calls.write(json.dumps(words) + "\\n")
{answer}
"""
_ANSWERS = {
    "sbatch": """
with open(folder + "/calls.jsonl") as calls:
    print(100 + sum(json.loads(line)[0] == "sbatch" for line in calls), end=";here\\n")
if os.environ.get("FAIL_AT") and os.environ["FAIL_AT"] in words:
    sys.exit("sbatch: error: refused")
""",
    "scontrol": """
if words[1:] == ["show", "config"]:
    print("MaxArraySize            = " + os.environ.get("MAX_ARRAY_SIZE", "1001"))
elif words[1:3] == ["show", "job"]:
    print("JobId=7 JobName=x\\n   Command=" + os.environ["SHOWN_COMMAND"] + "\\n   WorkDir=/")
""",
    "squeue": "print('2030-01-01T00:00:00')",
    # Runs what stands behind its own options, in the same process: signals reach it as they do a step.
    "srun": """
while words[1].startswith("-"):
    del words[1]
os.execvp(words[1], words[1:])
""",
    "apptainer": """
del words[:2]
while words[0].startswith("-"):
    del words[: 2 if words[0] in ("--bind", "--pwd") else 1]
os.execvp(words[1], words[1:])
""",
}
# Stands for pipeline.sweep where a test is about something else: one job, its arguments as they are.
_SWEEP = """
del words[:3]
sys.stdout.write("".join(word + "\\0" for word in (os.getcwd() + "/outputs/demo", *words)) + "\\0")
"""
# Stands for python: notes its words and environment, then does what PYTHON_DOES says.
_PYTHON = """
with open(folder + "/python.jsonl", "a") as seen:
    seen.write(json.dumps({"words": words[1:], "env": dict(os.environ)}) + "\\n")
exec(os.environ.get("PYTHON_DOES", ""))
"""


@dataclass(frozen=True)
class Seen:
    """One start of the python: its arguments and environment."""

    words: list[str]
    env: dict[str, str]


class FakeSlurm:
    """Commands in a folder of their own, first on PATH, and a site's file."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.site_file = folder / "site.env"
        self.site_file.write_text("")
        (folder / "bin").mkdir()
        for name, answer in {**_ANSWERS, "worker-python": _PYTHON, "sweep-python": _SWEEP}.items():
            command = folder / "bin" / name
            command.write_text(_FAKE.replace("{python}", sys.executable).replace("{answer}", answer))
            command.chmod(0o755)
        self.env = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SITE"))
        }
        for name in ("HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "SBATCH_EXPORT"):
            self.env.pop(name, None)
        python = Path(sys.executable).parent
        self.env |= {
            "PATH": os.pathsep.join([str(folder / "bin"), str(python), self.env["PATH"]]),
            "TOKENMILL_SITE": str(self.site_file),
            "TMPDIR": str(folder),
            "HF_HOME": str(folder / "huggingface"),
        }

    def site(self, text: str) -> None:
        self.site_file.write_text(text)

    def submit(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self._run([JOBS / "submit.sh", *words], env)

    def submit_demo(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """One job into outputs/demo, without the second that hydra takes."""
        return self.submit(*words, "conf=demo", SITE_SUBMIT_PYTHON="sweep-python", **env)

    def shell(self, script: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self._run(["bash", "-c", script], env)

    def start(self, script: str, *words: str, **env: str) -> subprocess.Popen[str]:
        """A script of jobs/ as a task of an array would run it."""
        task = {
            "SLURM_JOB_ID": "21",
            "SLURM_ARRAY_JOB_ID": "20",
            "SLURM_ARRAY_TASK_ID": "3",
            "TOKENMILL_ROOT": str(JOBS.parent),
            "SITE_PYTHON": "worker-python",
        }
        return subprocess.Popen(
            ["bash", str(JOBS / script), *words],
            env={name: value for name, value in {**self.env, **task, **env}.items() if value},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def task(self, script: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(script, *words, **env)
        out, err = process.communicate(timeout=_PATIENCE_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def calls(self, command: str) -> list[list[str]]:
        """What a command was asked, call by call, and forgotten here."""
        lines = [json.loads(line) for line in self._lines("calls.jsonl")]
        (self.folder / "calls.jsonl").write_text("")
        return [words[1:] for words in lines if words[0] == command]

    def seen(self) -> list[Seen]:
        """Each start of the python."""
        return [Seen(**json.loads(line)) for line in self._lines("python.jsonl")]

    def wait_for_python(self, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not (self.folder / "ready").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def _run(self, command: list[Any], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, command)),
            env={**self.env, **env},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )


# A python that notes signals, says that it is ready, and ends when told to by a USR1 or by the clock.
NOTES_SIGNALS = f"""
import signal, time
got = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda n, _: got.append(n))
open(folder + "/ready", "w").close()
end = time.monotonic() + {_PATIENCE_S}
while {int(signal.SIGUSR1)} not in got and time.monotonic() < end:
    time.sleep(0.02)
print(*(signal.Signals(n).name for n in got), flush=True)
sys.exit(int(os.environ.get("PYTHON_CODE", "138")))
"""
