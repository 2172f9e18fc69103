"""ReadAhead: which files are fetched, what is said of them, and that nothing else is touched."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import SHIPPED

from pipeline.config import HFSource, JobConfig, JsonlSource, ModelConfig, ParquetSource, PromptConfig
from pipeline.input.source import InputIndex
from pipeline.prefetch import fetch_data, needed_files, prefetch, report

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
SMALL = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]


class FakeHub:
    """One repository, `org/tiny`, made of the shipped model; notes what is asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = [*(file.name for file in SHIPPED.iterdir()), "onnx/model.onnx", "original/x.safetensors"]
        self.asked: list[tuple[str, str | None]] = []
        self.fetched: list[str] = []

    def model_info(self, name: str, revision: str | None = None) -> Any:
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.files])

    def snapshot_download(self, name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        self.asked.append((name, revision))
        place = self.folder / name.replace("/", "--") / COMMIT
        place.mkdir(parents=True)
        for file in self.files:
            if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns):
                shutil.copy(SHIPPED / file, place)
                self.fetched.append(file)
        return str(place)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: fake)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fake.snapshot_download)
    return fake


def job(**keys: Any) -> JobConfig:
    return JobConfig(
        **{
            "source": ParquetSource(path="rows.parquet"),
            "prompt": PromptConfig(column="text"),
            "model": ModelConfig(path=str(SHIPPED)),
            **keys,
        }
    )


def test_a_model_is_fetched_pinned_and_tried(hub: FakeHub) -> None:
    fetched = prefetch(job(model=ModelConfig(path="org/tiny", revision="v1")))
    assert hub.asked == [("org/tiny", "v1")]
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(hub.fetched)
    assert not [file for file in hub.fetched if "/" in file or file.endswith(".md")]
    said = report(fetched)
    assert f"org/tiny at {COMMIT}" in said and f"model.revision={COMMIT}" in said
    assert "HF_HUB_OFFLINE=1" in said and str(hub.folder) in said and "rows.parquet" in said


def test_a_tokenizer_of_its_own_comes_without_weights(hub: FakeHub) -> None:
    fetched = prefetch(job(model=ModelConfig(path=str(SHIPPED), tokenizer="org/tiny")))
    assert hub.asked == [("org/tiny", None)]
    assert "tokenizer.json" in hub.fetched and "model.safetensors" not in hub.fetched
    assert [(item.what, item.commit) for item in fetched] == [
        ("model", None),
        ("tokenizer", COMMIT),
        ("data", None),
    ]


def test_what_cannot_run_is_refused_here_and_not_on_a_worker(hub: FakeHub) -> None:
    hub.files.remove("model.safetensors")
    with pytest.raises(ValueError, match="has no weights"):
        prefetch(job(model=ModelConfig(path="org/tiny")))


def test_local_folders_have_nothing_to_fetch(hub: FakeHub) -> None:
    said = report(prefetch(job()))
    assert hub.asked == [] and said.count("nothing to fetch") == 2 and "Nothing comes from the hub" in said


def test_a_folder_that_is_not_there(hub: FakeHub, tmp_path: Path) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no\nsuch name")

    hub.model_info = fails  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"model\.path=.*nowhere cannot be fetched: no such folder"):
        prefetch(job(model=ModelConfig(path=str(tmp_path / "nowhere"))))


def test_an_offline_hub_is_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"model\.path=org/tiny cannot be fetched: HF_HUB_OFFLINE is set"):
        prefetch(job(model=ModelConfig(path="org/tiny")))


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin", "consolidated.safetensors"], ["model.safetensors"]),
        (
            [
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "consolidated.safetensors",
            ],
            SHARDS,
        ),
        (["pytorch_model.bin", "tf_model.h5"], ["pytorch_model.bin"]),
    ],
)
def test_of_several_formats_the_one_that_is_loaded(weights: list[str], wanted: list[str]) -> None:
    index = ["model.safetensors.index.json"] if len(wanted) > 1 else []
    assert needed_files([*SMALL, *index, *weights, "README.md"], None) == [*SMALL, *index, *wanted]


def test_of_several_gguf_files_the_chosen_one() -> None:
    files = [*SMALL, "a.Q4.gguf", "a.Q8.gguf", "model.safetensors"]
    assert needed_files(files, "a.Q8.gguf") == [*SMALL, "a.Q8.gguf"]


def test_code_and_templates() -> None:
    files = ["config.json", "modeling.py", "additional_chat_templates/rag.jinja"]
    assert needed_files(files, None) == ["config.json", "additional_chat_templates/rag.jinja"]
    assert needed_files(files, None, code=True) == files


def test_data_of_the_hub_is_prepared_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    index = InputIndex((), None, {"revision": COMMIT})  # type: ignore[arg-type]
    opened: list[object] = []

    def open_source(config: object) -> Any:
        opened.append(config)
        return SimpleNamespace(scan=lambda: index)

    monkeypatch.setattr("pipeline.input.source.open_source", open_source)
    source = HFSource(path="org/rows", split="test")
    found = fetch_data(job(source=source))
    assert opened == [source] and (found.name, found.commit) == ("org/rows[test]", COMMIT)
    assert f"source.revision={COMMIT}" in report([found])


def test_streaming_needs_the_network_that_workers_lack() -> None:
    with pytest.raises(ValueError, match=r"source\.streaming=true.*set source\.streaming=false"):
        fetch_data(job(source=HFSource(path="org/rows", streaming=True)))


def test_urls_are_named_as_read_by_the_workers() -> None:
    found = fetch_data(job(source=JsonlSource(path=["s3://bucket/a.jsonl", "b.jsonl"])))
    assert "network" in found.place and "s3://bucket/a.jsonl" in found.name


def test_the_command_takes_the_keys_of_a_run_and_leaves_nothing_behind(command: Any, tmp_path: Path) -> None:
    result = command("prefetch", "conf=demo", "output.dir=out", "sampling.max_tokens=5")
    assert (result.code, result.err) == (0, "")
    assert str(SHIPPED) in result.out and "demo_prompts.parquet" in result.out
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_one_line(command: Any) -> None:
    result = command("prefetch", "conf=demo", "model.path=./nowhere")
    assert (result.code, result.out) == (1, "")
    assert "model.path=./nowhere cannot be fetched" in result.err and result.err.count("\n") == 1
    result = command("prefetch", "conf=demo", "model.pth=x")
    assert result.code == 1 and "did you mean model.path?" in result.err
