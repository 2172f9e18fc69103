"""The README's tree names the files there are, all of them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def named() -> set[str]:
    tree = (ROOT / "README.md").read_text().split("## What is where")[1].split("```")[1]
    folder, found = "", set()
    for line in tree.splitlines():
        entry = re.match(r"(\s*)(\S+)", line)
        if entry is None:
            continue
        if entry[2].endswith("/"):
            folder = entry[2]
        elif entry[1]:
            found.add(folder + entry[2])
    return found


def test_every_module_has_its_line():
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pipeline").rglob("*.py")}
    there = {name for name in there if not name.endswith("__init__.py")}
    assert sorted(there - named()) == []


def test_every_line_has_its_file():
    assert sorted(name for name in named() if not (ROOT / name).exists()) == []
