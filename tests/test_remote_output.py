"""What a URL as output.dir means for the command line: where hydra writes, what is masked, what counts."""

from __future__ import annotations

from pathlib import Path

import fsspec.core
import pytest

from pipeline.config import OutputConfig
from pipeline.output.fingerprint import is_neutral
from pipeline.store import local_folder, open_store

URL = "s3://bucket/job"


def test_hydras_own_files_stay_on_this_machine_and_tell_no_secret(command, tmp_path: Path) -> None:
    result = command(
        "conf=demo",
        f"output.dir={URL}",
        f"output.stage_dir={tmp_path}/stage",
        "+output.storage_options={endpoint_url: 'http://store', secret: geheim}",
    )
    assert result.code == 0, result.err
    (job,) = result.jobs
    assert job.output.dir == URL
    assert job.output.storage_options == {"endpoint_url": "http://store", "secret": "geheim"}
    folder = local_folder(URL, f"{tmp_path}/stage")
    records = sorted(path.name for path in folder.glob("hydra/*/*.yaml"))
    assert records == ["config.yaml", "overrides.yaml"]
    assert not any("geheim" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    # nothing here is called as the bucket is
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]
    assert "geheim" not in command("conf=demo", "+output.storage_options.secret=geheim", "--cfg", "job").out


def test_jobs_of_a_sweep_may_be_remote_and_may_not_share_a_directory(command, tmp_path: Path) -> None:
    arguments = ("--multirun", "conf=demo", "seed=1,2", f"output.stage_dir={tmp_path}/stage")
    result = command(*arguments, "output.dir=s3://bucket/${seed}")
    assert [job.output.dir for job in result.jobs] == ["s3://bucket/1", "s3://bucket/2"]
    result = command(*arguments, f"output.dir={URL}")
    assert result.code == 1 and f"share output.dir={URL};" in result.err


def test_what_says_where_the_output_lies_is_no_part_of_the_job() -> None:
    for name in ("dir", "upload_interval_s", "storage_options", "stage_dir"):
        assert is_neutral(f"output.{name}")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"storage_options": "secret"}, "output.storage_options"),
        ({"upload_interval_s": -1.0}, "upload_interval"),
    ],
)
def test_wrong_values_are_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        OutputConfig(dir=URL, **wrong)  # type: ignore[arg-type]


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(url: str, **options: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", absent)
    with pytest.raises(ValueError, match=r"output\.dir=s3://bucket/job.*pip install 'tokenmill\[s3\]'"):
        open_store(URL)
