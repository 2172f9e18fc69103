"""The console script: `tokenmill [run|prefetch] key=value ...` and `tokenmill status|verify|finalize DIR`.

Knows: which verb is which module. Each verb is also a module of its own, `python -m pipeline.<verb>`.
"""

from __future__ import annotations

import importlib
import os
import sys

VERBS = ("run", "prefetch", "status", "verify", "finalize")


def main() -> None:
    """Hands sys.argv to the verb; without one, or with overrides only, the verb is `run`."""
    verb = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] in VERBS else None
    if verb in (None, "run"):
        _run(with_verb=verb is not None)
    else:
        sys.exit(importlib.import_module(f"pipeline.{verb}").main(sys.argv[2:]))


def _run(with_verb: bool) -> None:
    if with_verb:
        del sys.argv[1]
    # Tab completion: the shell hands over the whole line, and hydra takes every word for an override.
    line = os.environ.get("COMP_LINE", "")
    words = line.split(" ")
    if "-sc" in sys.argv[1:2] and words[1:2] == ["run"]:
        os.environ["COMP_LINE"] = line.replace(" run", "", 1)
        os.environ["COMP_POINT"] = str(int(os.environ.get("COMP_POINT", len(line))) - len(" run"))
    from pipeline.run import main as run

    run()


if __name__ == "__main__":
    main()
