"""Who may import whom, held by reading the imports: run -> job -> rooms, engine -> models -> kernels."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeline

PACKAGE = Path(pipeline.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "assets" not in path.parts)

# What each room may import of ours, beside itself. Files of the top level are entry points.
ARROWS = {
    "config": set(),
    "request": set(),
    "timeline": set(),
    "durable": set(),
    "store": {"durable", "stores"},
    "stores": set(),
    "input": {"config", "request", "durable"},
    "prompts": {"config", "request", "input"},
    "output": {"config", "request", "durable", "store", "stores", "input"},
    # What is left to do and whose it is, is read from the output.
    "cluster": {"config", "request", "durable", "store", "input", "output"},
    # What status says is read from the journals.
    "report": {"config", "request", "timeline", "output"},
    "kernels": {"config", "request"},
    "models": {"config", "request", "kernels"},
    "engine": {"config", "request", "timeline", "models", "kernels"},
    "bench": {"config", "request", "models", "engine", "report"},
    "sampling": {"config", "request", "input", "report"},
    "prepare": {
        *("config", "request", "input", "prompts", "output", "cluster", "engine", "models", "report"),
        *("sampling", "store"),
    },
    "worker_job": {"config", "request", "timeline", "output", "cluster", "report"},
    "job": {"config", "prompts", "output", "cluster", "report", "prepare", "worker_job"},
}
# What each room may not import of others'. A file's own entry adds to its room's.
FORBIDDEN = {
    "input": {"torch", "hydra", "omegaconf"},
    "prompts": {"torch", "hydra", "omegaconf"},
    "output": {"torch", "hydra", "omegaconf"},
    "cluster": {"torch", "hydra", "omegaconf"},
    "report": {"torch", "hydra", "omegaconf"},
    "engine": {"hydra", "omegaconf", "datasets", "pyarrow"},
    "models": {"hydra", "omegaconf", "datasets", "pyarrow"},
    "kernels": {"hydra", "omegaconf", "datasets", "pyarrow", "transformers"},
    "bench": {"hydra", "omegaconf", "datasets", "pyarrow"},
    "config": {"torch", "hydra", "omegaconf", "numpy"},
    "request": {"torch", "hydra", "omegaconf"},
    "job": {"torch", "hydra", "omegaconf"},
    "worker_job": {"torch", "hydra", "omegaconf"},
    "prepare": {"hydra", "omegaconf"},
    "sampling": {"torch", "hydra", "omegaconf"},
    "engine/scheduler.py": {"torch", "transformers"},
    "engine/sequence.py": {"torch", "transformers"},
    "engine/block_manager.py": {"torch", "transformers"},
    "input/parquet.py": {"datasets"},
    "bench/sizes.py": {"torch", "transformers"},
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names of the modules a file imports, anywhere in it; what `if TYPE_CHECKING` holds too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(name, package) if node.level else name
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imported(path: Path) -> set[str]:
    package = ".".join(("pipeline", *path.relative_to(PACKAGE).parts[:-1]))
    return set(imports_of(ast.parse(path.read_text()), package))


def test_the_reader_of_imports_sees_every_form():
    code = "import a.b\nfrom .c import d\ndef f():\n    from pipeline.e import g\n    from .. import h\n"
    found = set(imports_of(ast.parse(code), "pipeline.input"))
    assert {"a.b", "pipeline.input.c", "pipeline.input.c.d", "pipeline.e", "pipeline.h"} <= found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_along_the_arrows(path):
    room = room_of(path)
    names = imported(path)
    if room in ARROWS:
        ours = {name.split(".")[1] for name in names if name.startswith("pipeline.")}
        beyond = ours - ARROWS[room] - {room, "__version__"}
        assert not beyond, f"{room} may not import {sorted(beyond)}"
    relative = path.relative_to(PACKAGE).as_posix()
    forbidden = FORBIDDEN.get(room, set()) | FORBIDDEN.get(relative, set())
    others = {name.split(".")[0] for name in names}
    assert not others & forbidden, f"{relative} may not import {sorted(others & forbidden)}"


def test_every_room_is_spoken_of():
    rooms = {path.parent.name for path in FILES if path.parent != PACKAGE}
    assert rooms <= ARROWS.keys()


def test_datasets_is_imported_only_when_a_dataset_is_opened():
    for path in FILES:
        top = ast.Module([n for n in ast.parse(path.read_text()).body if not isinstance(n, ast.If)], [])
        for node in top.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "datasets" not in {name.split(".")[0] for name in imports_of(node, "pipeline")}, path


@pytest.mark.parametrize("module", ["pipeline", "pipeline.config", "pipeline.report.summary", "pipeline.cli"])
def test_light_modules_load_nothing_heavy(module):
    code = f"import sys, {module}; print(*sorted({{n.split('.')[0] for n in sys.modules}}))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert not set(run.stdout.split()) & {"torch", "transformers", "datasets", "pyarrow", "hydra"}
