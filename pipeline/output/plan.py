"""The plan of a job as `job.json` keeps it: all that a directory must tell to be resumed or checked alone.

Knows: the file's form. Refuses to know: models, engines, and the secrets of a source's storage.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import config as settings
from pipeline.config import OutputConfig, SourceConfig, TopkDtype
from pipeline.input.order import RowOrder
from pipeline.input.source import InputIndex
from pipeline.output.fingerprint import Fingerprint, digest, plain
from pipeline.output.layout import JOB_FILE
from pipeline.output.schema import OutputSchema, output_schema
from pipeline.store import Store, open_store

FORMAT = 1
_OUTPUT_KEYS = ("columns", "prompt", "prompt_ids", "completion_ids", "logprobs", "topk", "topk_dtype")


@dataclass(frozen=True)
class JobPlan:
    """What a job reads, in which order, and what each row becomes.

    samples: completions per row. provenance: facts for people (versions, revisions), kept in the output's
    metadata as they were at the first start.
    """

    source: SourceConfig
    output: OutputConfig
    seed: int
    samples: int
    fingerprint: Fingerprint
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return digest(self.fingerprint)

    def order(self, index: InputIndex) -> RowOrder:
        source = self.source
        seed = self.seed if source.shuffle else None
        return RowOrder(index.blocks, skip=source.skip, limit=source.limit, shuffle_seed=seed)

    def schema(self, index: InputIndex) -> OutputSchema:
        # so that a part tells by itself in what it differs from another job's
        settings = json.dumps(self.fingerprint, sort_keys=True)
        about = {"fingerprint": self.digest, "settings": settings, **self.provenance}
        return output_schema(self.output, index.schema, about)

    def encode(self) -> bytes:
        source = dataclasses.asdict(self.source)
        # may hold keys and passwords; who resumes or verifies gets them from the environment again
        source.pop("storage_options", None)
        output = {key: plain(getattr(self.output, key)) for key in _OUTPUT_KEYS}
        content = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "source": {"kind": type(self.source).__name__, **plain(source)},
            "output": output,
            "seed": self.seed,
            "samples": self.samples,
            "provenance": plain(self.provenance),
        }
        return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")

    @classmethod
    def read(cls, job: Path, store: Store | None = None) -> JobPlan:
        """Raises ValueError if the directory holds no job, or one of another format."""
        path = job / JOB_FILE
        try:
            data = (store or open_store(job)).read(path)
            content = json.loads(data.decode("utf-8", "surrogatepass"))
        except FileNotFoundError:
            raise ValueError(f"{job} holds no job: there is no {JOB_FILE} in it") from None
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path} is damaged ({error}): restore it, or choose another output.dir"
            ) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} was not written by this version: use the one that started the job")
        output = {**content["output"], "topk_dtype": TopkDtype(content["output"]["topk_dtype"])}
        return cls(
            source=_source(dict(content["source"])),
            output=OutputConfig(dir=str(job), **output),
            seed=content["seed"],
            samples=content["samples"],
            fingerprint=content["fingerprint"],
            provenance=content["provenance"],
        )


def _source(fields: dict[str, Any]) -> SourceConfig:
    kind = getattr(settings, fields.pop("kind"))
    source: SourceConfig = kind(**fields)
    return source
