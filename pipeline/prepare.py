"""Everything a job must know before its model's weights are read.

Whatever can be wrong with a configuration, its input, its prompts or its output directory is found
here, from cheap to dear, so that a mistake costs seconds and leaves nothing behind.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from typing import Any

import torch

from pipeline import __version__
from pipeline.cluster.claims import Claim, Claims
from pipeline.cluster.join import join
from pipeline.cluster.time_limit import TimeLimit
from pipeline.cluster.workers import Member
from pipeline.config import Determinism, JobConfig, TransformersEngineConfig
from pipeline.engine import Engine
from pipeline.engine.continuous_batching import runs_async
from pipeline.engine.transformers_backend import TransformersEngine
from pipeline.engine.transformers_limits import check_sampling
from pipeline.input.filter import FilterError, RowFilter
from pipeline.input.rows import Row, RowReader, read_rows
from pipeline.input.source import InputIndex, Source, absolute, open_source
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
from pipeline.models.transformers_model import inspect_for_transformers, load_for_transformers
from pipeline.output.fingerprint import fingerprint
from pipeline.output.plan import JobPlan
from pipeline.output.progress import JobDirectory
from pipeline.output.schema import carried_columns
from pipeline.output.writer import OutputWriter
from pipeline.prompts.prompts import PromptBuilder, longest_prompt
from pipeline.report.start_up import StartUp
from pipeline.report.summary import ResolvedValue
from pipeline.request import FinishReason, Refusal, Request, RowError, SamplingParams
from pipeline.sampling import RowSampling, resolve_sampling
from pipeline.store import open_store


@dataclass(frozen=True)
class PreparedJob:
    """A job ready to run, as `job.run_worker` takes it.

    facts, sampling, first_prompt: what to tell the user at the start. started: since when this process costs
    money, as time.time tells.
    """

    config: JobConfig
    directory: JobDirectory
    member: Member
    claims: Claims
    limit: TimeLimit
    started: float
    facts: dict[str, object]
    sampling: list[ResolvedValue]
    first_prompt: str | None
    _source: Source
    _columns: Sequence[str]
    _prompts: PromptBuilder
    _filter: RowFilter | None
    _row_sampling: RowSampling | None
    _params: SamplingParams
    _tokenizer: Any
    _inspected: InspectedModel

    @property
    def num_results(self) -> int:
        """Results the whole job consists of."""
        return self.directory.num_results

    def requests(self, work: Iterable[Claim]) -> Iterator[Request]:
        """What each claim lacks, in ordinal order, read and tokenised as it is asked for."""
        reader = RowReader(self._source, self.directory.order, self._columns)
        for claim in work:
            rows = chain.from_iterable(reader.rows(wanted) for wanted in claim.ranges())
            # one claim at a time: what is read of one must not wait for the next to be had
            yield from self._prompts.requests(
                rows, self._params, claim.samples, self._verdict, self._row_sampling
            )

    def load_engine(self, start_up: StartUp) -> Engine | TransformersEngine:
        """The engine, ready for its first step. start_up: told when the model is there, and the engine."""
        output, engine = self.config.output, self.config.engine
        if isinstance(engine, TransformersEngineConfig):
            loaded = load_for_transformers(self.config.model, engine, self._tokenizer, self._inspected)
            start_up.finished("model")
            made: Engine | TransformersEngine = TransformersEngine(loaded, engine, sampling=self._params)
        else:
            loaded = load_model(self.config.model, self._tokenizer, self._inspected)
            start_up.finished("model")
            made = Engine(
                loaded, engine, seed=self.config.seed, logprobs=output.logprobs, num_topk=output.topk
            )
        start_up.finished("engine")
        return made

    def writer(self) -> OutputWriter:
        record = self.member.record
        return self.directory.writer(
            self.config.output,
            self.claims,
            record.incarnation,
            record.worker,
            self.started,
            record.gpu_hour_usd,
        )

    def _verdict(self, row: Row) -> Refusal | None:
        """What is known to be wrong with a row, or unwanted in it, before its prompt is made."""
        try:
            if self._filter is not None and not self._filter.keeps(row):
                return Refusal(FinishReason.SKIPPED)
            if self._row_sampling is not None:
                self._row_sampling(row)
        except FilterError as error:
            return Refusal(FinishReason.ERROR, RowError("filter_failed", str(error)))
        except ValueError as error:
            return Refusal(FinishReason.ERROR, RowError("sampling_invalid", str(error)))
        return None


def prepare(config: JobConfig, worker: str = "w0", started: float | None = None) -> PreparedJob:
    """Find out all there is to know; make or join the job directory last.

    Raises ValueError or OSError naming key, value and remedy.
    """
    started = time.time() if started is None else started
    asked = config.model.revision
    inspected = _inspect(_pinned(config))
    config = replace(config, model=inspected.config, source=absolute(config.source))
    tokenizer = load_tokenizer(config.model)
    # Without a generation configuration, transformers takes the stop ids of the configuration.
    eos_ids = stop_ids(inspected.generation_config or inspected.hf_config, tokenizer)
    params, sampling = resolve_sampling(config, inspected.generation_config, tokenizer, eos_ids)
    if isinstance(config.engine, TransformersEngineConfig):
        check_sampling(config.sampling, params)
    _check_sizes(config, params, inspected, tokenizer)

    plan = JobPlan(
        source=config.source,
        output=config.output,
        seed=config.seed,
        samples=config.sampling.n,
        fingerprint=fingerprint(config, _resolved(config, inspected, tokenizer, sampling)),
        provenance=_provenance(config, asked),
    )
    source, index = _open_input(config, plan)
    # An empty file of JSON lines has no columns to miss.
    names = index.schema.names if index.num_rows or index.schema.names else None
    prompts = PromptBuilder(
        config.prompt,
        tokenizer,
        longest_prompt(config.prompt, inspected.max_model_len),
        names,
        config.model.path,
    )
    row_filter = RowFilter(config.source.filter, names) if config.source.filter and names else None
    row_sampling = None
    if config.sampling.column is not None and names is not None:
        row_sampling = RowSampling(config.sampling.column, params, tokenizer, names)
    columns = _columns(config, index, prompts, row_filter)
    first_prompt = _first_prompt(config, source, index, columns, prompts)

    place = join(config, worker, started, plan, index)
    return PreparedJob(
        config=config,
        directory=place.directory,
        member=place.member,
        claims=place.claims,
        limit=place.limit,
        started=started,
        facts=_facts(config, inspected, place.directory),
        sampling=sampling,
        first_prompt=first_prompt,
        _source=source,
        _columns=columns,
        _prompts=prompts,
        _filter=row_filter,
        _row_sampling=row_sampling,
        _params=params,
        _tokenizer=tokenizer,
        _inspected=inspected,
    )


def _pinned(config: JobConfig) -> JobConfig:
    """A resumed job keeps the commit that it found at its first start, wherever a branch is by now."""
    store = open_store(config.output.dir, config.output.storage_options, config.output.stage_dir)
    if not JobDirectory.has_output(config.output.dir, store):
        return config
    plan = JobDirectory.load(config.output.dir, store).plan
    if plan.provenance.get("revision") != config.model.revision:
        # Another revision was asked for: if it is another commit, the fingerprints will differ.
        return config
    model = replace(config.model, revision=plan.fingerprint.get("model.revision"))
    return replace(config, model=model)


def _inspect(config: JobConfig) -> InspectedModel:
    if isinstance(config.engine, TransformersEngineConfig):
        return inspect_for_transformers(config.model, config.engine)
    return inspect_model(config.model)


def _open_input(config: JobConfig, plan: JobPlan) -> tuple[Source, InputIndex]:
    """The source and its index: scanned once, at the job's first start."""
    stored = None
    store = open_store(config.output.dir, config.output.storage_options, config.output.stage_dir)
    if JobDirectory.has_output(config.output.dir, store):
        # Another source would show as changed files: the keys that differ say more.
        JobDirectory.refuse_another(config.output.dir, plan, store)
        stored = JobDirectory.stored_index(config.output.dir, store)
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
    wanted.update(name for name in (config.sampling.column, config.report.expected_column) if name)
    return [name for name in index.schema.names if name in wanted]


def _first_prompt(
    config: JobConfig, source: Source, index: InputIndex, columns: Sequence[str], prompts: PromptBuilder
) -> str | None:
    """The first row's prompt as the model will see it, or why it has none; None for an empty input."""
    order = JobPlan(config.source, config.output, config.seed, config.sampling.n, {}).order(index)
    row = next(read_rows(source, order, [0], columns), None) if order.num_rows else None
    prompts.check(row)
    if row is None:
        return None
    built = prompts.build(row)
    if isinstance(built, Refusal):
        return f"(none: {built.error or built.finish_reason.value})"
    return built.text


def _check_sizes(
    config: JobConfig, params: SamplingParams, inspected: InspectedModel, tokenizer: Any
) -> None:
    """Raises ValueError for numbers that no row could live with, whatever its prompt."""
    num_ids = min(inspected.architecture.vocab_size, len(tokenizer))
    if config.output.topk > num_ids:
        raise ValueError(
            f"output.topk={config.output.topk} exceeds the model's vocabulary of {num_ids} tokens: "
            f"use {num_ids} or less"
        )
    engine = config.engine
    shortest = min(1 + params.max_tokens, inspected.max_model_len)
    if engine.num_blocks is not None and (engine.num_blocks - 1) * engine.block_size < shortest:
        raise ValueError(
            f"engine.num_blocks={engine.num_blocks} of engine.block_size={engine.block_size} tokens, one of "
            f"them set aside, hold no row of {shortest} tokens (a prompt of one and sampling.max_tokens="
            f"{params.max_tokens}): raise engine.num_blocks, or lower sampling.max_tokens"
        )


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
        "engine.backend": "transformers" if isinstance(config.engine, TransformersEngineConfig) else "native",
        **_bitwise_steps(config, device),
        "version": __version__,
    }


def _bitwise_steps(config: JobConfig, device: torch.device) -> dict[str, Any]:
    """On a GPU, which bits a row gets depends on the GPU and on the sizes that its steps are padded to."""
    engine = config.engine
    if device.type != "cuda" or engine.determinism is not Determinism.bitwise:
        return {}
    sizes = f"up to {engine.max_num_batched_tokens} tokens of {engine.max_num_seqs} rows"
    return {"engine.bitwise_steps": f"{torch.cuda.get_device_name(device)}, {sizes}"}


def _provenance(config: JobConfig, asked: str | None) -> dict[str, Any]:
    """Facts for people, kept in the output's metadata as they were at the first start.

    asked: the revision as the user gave it, before it was pinned.
    """
    packages = ("torch", "transformers", "pyarrow")
    return {
        "model": config.model.path,
        "revision": asked,
        "commit": config.model.revision,
        "tokenmill": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "chat_template_kwargs": config.prompt.chat_template_kwargs,
    }


def _model_name(config: JobConfig) -> str:
    model = config.model
    name = f"{model.path}/{model.gguf_file}" if model.gguf_file else model.path
    name += f" at {model.revision[:12]}" if model.revision else ""
    return f"{name} with {model.adapter}" if model.adapter else name


def _facts(config: JobConfig, inspected: InspectedModel, directory: JobDirectory) -> dict[str, object]:
    source, engine = config.source, config.engine
    where = getattr(source, "path", "")
    kind = inspected.hf_config.model_type
    return {
        "model": f"{_model_name(config)} ({kind}), {inspected.max_model_len:,} tokens a row",
        "input": f"{where}: {directory.num_rows:,} rows, {directory.samples} samples each",
        "engine": f"{_engine_fact(config)}, {engine.max_num_seqs} sequences, "
        f"{engine.max_num_batched_tokens} tokens a step",
        "output": config.output.dir,
    }


def _engine_fact(config: JobConfig) -> str:
    engine = config.engine
    if not isinstance(engine, TransformersEngineConfig):
        mode = "" if engine.mode is None else f"{engine.mode.value}, "
        return f"native, {mode}determinism {engine.determinism.value}"
    overlaps = runs_async(engine.mode, resolve_device(config.model.device))
    return f"transformers {version('transformers')}, {'async' if overlaps else 'sync'}, draws not repeatable"
