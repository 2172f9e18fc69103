"""Everything a job must know before its model's weights are read.

Whatever can be wrong with a configuration, its input, its prompts or its output directory is found
here, from cheap to dear, so that a mistake costs seconds and leaves nothing behind.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pipeline import __version__
from pipeline.config import JobConfig
from pipeline.data.filter import FilterError, RowFilter
from pipeline.data.fingerprint import fingerprint
from pipeline.data.plan import JobPlan
from pipeline.data.progress import JobDirectory, Remaining
from pipeline.data.prompts import PromptBuilder, longest_prompt
from pipeline.data.rows import Row, read_rows
from pipeline.data.schema import carried_columns
from pipeline.data.source import InputIndex, Source, open_source
from pipeline.data.writer import OutputWriter
from pipeline.engine import Engine
from pipeline.models.identity import model_identity
from pipeline.models.load import (
    InspectedModel,
    inspect_model,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
    stop_ids,
)
from pipeline.report.summary import ResolvedValue
from pipeline.request import FinishReason, Refusal, Request, RowError, SamplingParams
from pipeline.sampling import resolve_sampling


@dataclass(frozen=True)
class PreparedJob:
    """A job ready to run. Context manager: leaving it lets others work on the directory.

    facts, sampling, first_prompt: what to tell the user at the start.
    """

    config: JobConfig
    directory: JobDirectory
    remaining: Remaining
    facts: dict[str, object]
    sampling: list[ResolvedValue]
    first_prompt: str | None
    _source: Source
    _columns: Sequence[str]
    _prompts: PromptBuilder
    _filter: RowFilter | None
    _params: SamplingParams
    _tokenizer: Any
    _inspected: InspectedModel

    @property
    def num_results(self) -> int:
        """Results the whole job consists of: rows times samples."""
        return self.directory.num_rows * self.directory.samples

    def requests(self) -> Iterator[Request]:
        """What is still to do, in ordinal order, read and tokenised as it is asked for."""
        rows = read_rows(self._source, self.directory.order, self.remaining.ranges(), self._columns)
        refuse = None if self._filter is None else self._verdict
        return self._prompts.requests(rows, self._params, self.remaining.samples, refuse)

    def load_engine(self) -> Engine:
        output = self.config.output
        return Engine(
            load_model(self.config.model, self._tokenizer, self._inspected),
            self.config.engine,
            seed=self.config.seed,
            logprobs=output.logprobs,
            num_topk=output.topk,
        )

    def writer(self, worker: str, started: float) -> OutputWriter:
        return self.directory.writer(
            self.config.output, self.remaining, worker, started, self.config.cost.gpu_hour_usd
        )

    def _verdict(self, row: Row) -> Refusal | None:
        assert self._filter is not None
        try:
            return None if self._filter.keeps(row) else Refusal(FinishReason.SKIPPED)
        except FilterError as error:
            return Refusal(FinishReason.ERROR, RowError("filter_failed", str(error)))

    def __enter__(self) -> PreparedJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.directory.close()


def prepare(config: JobConfig) -> PreparedJob:
    """Find out all there is to know; make or resume the job directory last.

    Raises ValueError or OSError naming key, value and remedy.
    """
    inspected = inspect_model(config.model)
    tokenizer = load_tokenizer(config.model)
    eos_ids = stop_ids(inspected.generation_config, tokenizer)
    params, sampling = resolve_sampling(config, inspected.generation_config, tokenizer, eos_ids)

    source, index = _open_input(config)
    names = index.schema.names if index.files else None
    prompts = PromptBuilder(
        config.prompt,
        tokenizer,
        longest_prompt(config.prompt, inspected.max_model_len),
        names,
        config.model.path,
    )
    row_filter = RowFilter(config.source.filter, index.schema.names) if config.source.filter else None
    columns = _columns(config, index, prompts, row_filter)
    first_prompt = _first_prompt(config, source, index, columns, prompts)

    plan = JobPlan(
        source=config.source,
        output=config.output,
        seed=config.seed,
        samples=config.sampling.n,
        fingerprint=fingerprint(config, _resolved(config, inspected, tokenizer, sampling)),
        provenance=_provenance(config),
    )
    directory = JobDirectory.open(config.output.dir, plan, index)
    return PreparedJob(
        config=config,
        directory=directory,
        remaining=directory.remaining(config.output.retry_errors),
        facts=_facts(config, inspected, directory),
        sampling=sampling,
        first_prompt=first_prompt,
        _source=source,
        _columns=columns,
        _prompts=prompts,
        _filter=row_filter,
        _params=params,
        _tokenizer=tokenizer,
        _inspected=inspected,
    )


def _open_input(config: JobConfig) -> tuple[Source, InputIndex]:
    """The source and its index: scanned once, at the job's first start."""
    stored = JobDirectory.stored_index(config.output.dir)
    source = open_source(config.source, stored)
    if stored is not None:
        source.check(stored)
    return source, source.scan()


def _columns(
    config: JobConfig, index: InputIndex, prompts: PromptBuilder, row_filter: RowFilter | None
) -> list[str]:
    """Input columns that somebody reads, each once, in the input's order."""
    wanted = {*carried_columns(config.output, index.schema), *prompts.columns}
    wanted.update(row_filter.columns if row_filter else ())
    if config.report.expected_column is not None:
        wanted.add(config.report.expected_column)
    return [name for name in index.schema.names if name in wanted]


def _first_prompt(
    config: JobConfig, source: Source, index: InputIndex, columns: Sequence[str], prompts: PromptBuilder
) -> str | None:
    """The first row's prompt as the model will see it; None for an empty input or a refused row."""
    order = JobPlan(config.source, config.output, config.seed, config.sampling.n, {}).order(index)
    row = next(read_rows(source, order, [0], columns), None) if order.num_rows else None
    prompts.check(row)
    if row is None:
        return None
    built = prompts.build(row)
    return None if isinstance(built, Refusal) else built.text


def _resolved(
    config: JobConfig, inspected: InspectedModel, tokenizer: Any, sampling: Sequence[ResolvedValue]
) -> dict[str, Any]:
    """What the configuration leaves open, as it applies to this job."""
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, inspected.hf_config, device)
    return {
        **{value.key: value.value for value in sampling},
        **model_identity(config.model, inspected, tokenizer),
        "model.device": device.type,
        "model.dtype": str(dtype).removeprefix("torch."),
        "model.max_model_len": inspected.max_model_len,
        "version": __version__,
    }


def _provenance(config: JobConfig) -> dict[str, Any]:
    """Facts for people, kept in the output's metadata as they were at the first start."""
    packages = ("torch", "transformers", "pyarrow")
    return {
        "model": config.model.path,
        "tokenmill": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "chat_template_kwargs": config.prompt.chat_template_kwargs,
    }


def _facts(config: JobConfig, inspected: InspectedModel, directory: JobDirectory) -> dict[str, object]:
    source, engine = config.source, config.engine
    where = getattr(source, "path", "")
    kind = inspected.hf_config.model_type
    return {
        "model": f"{config.model.path} ({kind}), {inspected.max_model_len:,} tokens a row",
        "input": f"{where}: {directory.num_rows:,} rows, {directory.samples} samples each",
        "engine": f"{engine.mode.value}, {engine.max_num_seqs} sequences, "
        f"{engine.max_num_batched_tokens} tokens a step, determinism {engine.determinism.value}",
        "output": config.output.dir,
    }
