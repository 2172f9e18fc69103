"""Copies of a model's files on a disk of the machine: one for all, whole, and only where there is room."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from pipeline.config import ModelConfig
from pipeline.models.load import load_model
from pipeline.models.stage import staged

TINY = Path(__file__).resolve().parents[2] / "pipeline" / "assets" / "tiny-model"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder such as the hub's cache has: names that are links to what they name."""
    folder = tmp_path / "my model"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "blob").write_text("weights")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    (folder / "sub" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were copied; a copy takes its time."""
    copied: list[str] = []
    real = shutil.copyfile

    def slow(source: Path, target: Path) -> None:
        copied.append(Path(source).name)
        time.sleep(0.05)
        real(source, target)

    monkeypatch.setattr(shutil, "copyfile", slow)
    return copied


def config(model: Path | str, place: Path, **keys: str) -> ModelConfig:
    return ModelConfig(path=str(model), stage_dir=str(place / "staged"), **keys)  # type: ignore[arg-type]


def test_the_first_copies_and_the_others_wait_for_it(model: Path, tmp_path: Path, copies: list[str]) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(staged(config(model, tmp_path)).path)) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(copies) == ["config.json", "model.safetensors"]
    (place,) = {Path(path) for path in found}
    assert len(found) == 5 and place.parent == tmp_path / "staged"
    assert (place / "model.safetensors").read_text() == "weights"
    assert (place / "sub" / "config.json").read_text() == "{}"
    assert not any(path.is_symlink() for path in place.rglob("*"))


@pytest.mark.parametrize("change", ["content", "date"])
def test_other_weights_under_the_same_path_get_a_copy_of_their_own(
    model: Path, tmp_path: Path, change: str
) -> None:
    first = staged(config(model, tmp_path)).path
    assert staged(config(model, tmp_path)).path == first
    if change == "content":
        (tmp_path / "blob").write_text("other weights")
    else:
        os.utime(tmp_path / "blob", (1, 1))
    second = staged(config(model, tmp_path)).path
    assert second != first
    assert (Path(second) / "model.safetensors").read_text() == (tmp_path / "blob").read_text()


def test_a_copy_that_broke_off_is_made_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = shutil.copyfile, 0

    def dies(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            target.write_text("wei")
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(shutil, "copyfile", dies)
    with pytest.raises(KeyboardInterrupt):
        staged(config(model, tmp_path))
    place = Path(staged(config(model, tmp_path)).path)
    assert (place / "model.safetensors").read_text() == "weights"
    assert (place / "sub" / "config.json").read_text() == "{}"
    assert not list((tmp_path / "staged").glob("*.partial"))


def test_without_room_the_files_are_read_from_where_they_are(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    given = config(model, tmp_path)
    assert staged(given) == given
    assert "model.stage_dir=" in capsys.readouterr().err


def test_nothing_is_copied_unless_asked_for(model: Path, copies: list[str]) -> None:
    given = ModelConfig(path=str(model))
    assert staged(given) is given and copies == []


def test_of_a_folder_of_gguf_files_one_is_copied(model: Path, tmp_path: Path, copies: list[str]) -> None:
    for name in ("q4.gguf", "q8.gguf"):
        (model / name).write_text(name)
    place = staged(config(model / "q8.gguf", tmp_path))
    assert copies == ["q8.gguf"] and place.gguf_file == "q8.gguf"
    assert (Path(place.path) / "q8.gguf").read_text() == "q8.gguf"


def test_a_name_on_the_hub_is_copied_from_its_cache_where_nothing_can_be_fetched(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("0" * 40)
    shutil.copytree(TINY, snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    given = config("org/name", tmp_path, revision="0" * 40)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert staged(given) == given
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    place = staged(given)
    assert place.revision is None and Path(place.path).name.startswith("name-")
    assert {path.name for path in Path(place.path).iterdir()} == {path.name for path in TINY.iterdir()}


def test_a_model_is_loaded_from_its_copy(tmp_path: Path, copies: list[str]) -> None:
    loaded = load_model(config(TINY, tmp_path))
    (place,) = (path for path in (tmp_path / "staged").iterdir() if path.is_dir())
    assert loaded.model.name_or_path == str(place)
    assert len(copies) == len(list(TINY.iterdir()))
