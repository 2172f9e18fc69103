"""Every setting of a job, its type and its default: the place to look up what a key means.

Chosen values live in `conf/`; this file says what may be chosen. Plain dataclasses (not frozen:
Hydra writes overrides into them) and Enums (Hydra refuses `Literal`). `__post_init__` holds the
rules between keys; they fire when the job starts, not under `--cfg job`. Imports nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional

# Mappings are typed Any and null by default: OmegaConf lets nobody add a key to a typed one from the
# command line. Those who read them take `mapping(key, value)`.

# What OmegaConf calls MISSING, spelled out so that nothing here needs omegaconf.
REQUIRED: Any = "???"


class Dtype(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class LoadFormat(str, Enum):
    auto = "auto"
    dummy = "dummy"


class EngineMode(str, Enum):
    sync = "sync"
    # Users type `async`, and OmegaConf looks an Enum up by member name; as a keyword it cannot be
    # written as one. So the member is named by hand, and `async_` is its alias for our own code.
    vars()["async"] = "async"
    async_ = "async"


class Determinism(str, Enum):
    auto = "auto"
    fast = "fast"
    bitwise = "bitwise"


class Attention(str, Enum):
    auto = "auto"
    eager = "eager"
    sdpa = "sdpa"
    flash_attention_2 = "flash_attention_2"
    flash_attention_3 = "flash_attention_3"


class Requeue(str, Enum):
    never = "never"
    # The worker asks Slurm itself, as its last word.
    scontrol = "scontrol"
    # It ends with 85, for a script around it to ask: in a container there is no scontrol.
    exit_code = "exit_code"


class LauncherKind(str, Enum):
    none = "none"
    local = "local"


class ChatMode(str, Enum):
    model = "model"
    none = "none"


class OverLong(str, Enum):
    error = "error"
    skip = "skip"
    truncate_left = "truncate_left"
    truncate_right = "truncate_right"


class TruncateAt(str, Enum):
    token = "token"
    line = "line"


class SamplingDefaults(str, Enum):
    model = "model"
    none = "none"


class AttentionKernel(str, Enum):
    auto = "auto"
    triton = "triton"
    flash_attention_3 = "flash_attention_3"


class Workload(str, Enum):
    A = "A"
    B = "B"
    C = "C"


class TopkDtype(str, Enum):
    float16 = "float16"
    float32 = "float32"


@dataclass
class SourceConfig:
    """Where rows come from. Ordinals are given by skip, limit and shuffle; then `filter` applies."""

    skip: int = 0
    limit: Optional[int] = None
    # A seeded permutation (of the job's seed): row groups first, then rows within one.
    shuffle: bool = False
    # A Jinja expression over the row's columns, e.g. "language == 'en'"; false ends the row as skipped.
    filter: Optional[str] = None
    # Rows per unit of work: the grain of resume, and of sharing between workers.
    unit_rows: int = 1000
    # Accept files that came after the job's start as new units.
    allow_append: bool = False

    def __post_init__(self) -> None:
        _at_least("source.skip", self.skip, 0)
        _at_least("source.limit", self.limit, 0)
        _at_least("source.unit_rows", self.unit_rows, 1)


@dataclass
class ParquetSource(SourceConfig):
    # A path, glob, directory or fsspec URL, or a list of them.
    path: Any = REQUIRED
    storage_options: Any = None


@dataclass
class ArrowSource(SourceConfig):
    path: Any = REQUIRED
    storage_options: Any = None


@dataclass
class JsonlSource(SourceConfig):
    path: Any = REQUIRED
    storage_options: Any = None
    # Arrow types of columns, e.g. {score: float64}. A column not named here is carried as text:
    # strings as they are, other values as JSON.
    schema: Any = None


@dataclass
class HFSource(SourceConfig):
    """A dataset of the Hugging Face hub, or a local folder (of data files or of `save_to_disk`)."""

    path: str = REQUIRED
    name: Optional[str] = None
    split: str = "train"
    revision: Optional[str] = None
    streaming: bool = False
    data_files: Any = None


@dataclass
class PromptConfig:
    """How a row becomes token ids. Exactly one of column, messages, template, input_ids."""

    column: Optional[str] = None
    messages: Optional[str] = None
    template: Optional[str] = None
    input_ids: Optional[str] = None
    system: Optional[str] = None
    # `model`: the tokenizer's chat template; `none`: the text as it is.
    chat: ChatMode = ChatMode.model
    # For the template, e.g. {enable_thinking: false}.
    chat_template_kwargs: Any = None
    # The last message is an assistant's beginning; the model continues it.
    continue_final_message: bool = False
    # Longest prompt in tokens; null leaves room for one token below model.max_model_len.
    max_tokens: Optional[int] = None
    too_long: OverLong = OverLong.error
    # Shorten this column inside the template, never the instruction around it.
    truncate_column: Optional[str] = None
    truncate_at: TruncateAt = TruncateAt.token
    # Rows tokenised ahead of the engine by the background thread.
    prefetch_rows: int = 1024

    def __post_init__(self) -> None:
        given = [n for n in ("column", "messages", "template", "input_ids") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError(
                f"prompt has {given or 'none'} of column, messages, template, input_ids: set exactly one, "
                "e.g. prompt.column=text prompt.template=null"
            )
        _at_least("prompt.max_tokens", self.max_tokens, 1)
        _at_least("prompt.prefetch_rows", self.prefetch_rows, 1)
        if self.truncate_column is not None:
            if self.input_ids is not None:
                raise ValueError("prompt.truncate_column needs text: it cannot be used with prompt.input_ids")
            if self.too_long not in (OverLong.truncate_left, OverLong.truncate_right):
                raise ValueError(
                    f"prompt.truncate_column={self.truncate_column} needs prompt.too_long=truncate_left or "
                    f"truncate_right, not {self.too_long.value}"
                )


@dataclass
class ModelConfig:
    # A folder in transformers' format, a hub name, or a GGUF file in either (FOLDER/file.gguf).
    path: str = REQUIRED
    # A branch, tag or commit of the hub; a job keeps the commit it found at its first start.
    revision: Optional[str] = None
    # The GGUF file in model.path; its weights are unpacked as they are loaded.
    gguf_file: Optional[str] = None
    # A folder in peft's format with a LoRA adapter for the model, merged into the weights at load.
    adapter: Optional[str] = None
    tokenizer: Optional[str] = None
    # `auto`: float32 on the CPU, the configuration's own type on a GPU.
    dtype: Dtype = Dtype.auto
    device: Device = Device.auto
    # Prompt and completion together; null takes the configuration's max_position_embeddings.
    max_model_len: Optional[int] = None
    load_format: LoadFormat = LoadFormat.auto
    # A folder on a disk of this machine: weights are copied there once, for all its processes, and read
    # from there. Null: they are read from where they are.
    stage_dir: Optional[str] = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _at_least("model.max_model_len", self.max_model_len, 2)
        if self.path.endswith(".gguf"):
            if self.gguf_file is not None:
                raise ValueError(
                    f"model.path={self.path} is a GGUF file: leave model.gguf_file={self.gguf_file} out"
                )
            folder, _, self.gguf_file = self.path.rpartition("/")
            # One form from here on, for all that open the folder.
            self.path = folder or "."
        if self.gguf_file is not None and not self.gguf_file.endswith(".gguf"):
            raise ValueError(f"model.gguf_file={self.gguf_file} is no name of a GGUF file: it ends in .gguf")
        if self.gguf_file is not None and self.load_format is LoadFormat.dummy:
            raise ValueError(
                "model.load_format=dummy makes random weights and reads no file: leave the GGUF file out"
            )


@dataclass
class EngineConfig:
    # Null: async on a GPU, sync on the CPU, where the thread that prepares batches takes its time from
    # the one that computes them (measured on 2 cores: 0.5 times the speed).
    mode: Optional[EngineMode] = None
    # `auto`: bitwise on the CPU, fast on a GPU.
    determinism: Determinism = Determinism.auto
    # Sequences in flight at once, and tokens computed in one step.
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    # KV positions per block of the paged cache.
    block_size: int = 32
    # KV blocks in all; null takes what kv_cache_gb holds.
    num_blocks: Optional[int] = None
    # GiB of KV memory on the CPU; on a GPU it is what remains of gpu_memory_utilization.
    kv_cache_gb: float = 1.0
    # Share of the GPU's memory that weights, activations, graphs and KV cache may take together.
    gpu_memory_utilization: float = 0.92
    # Replay decode steps as CUDA graphs, and walk the layers of common models with fused kernels.
    cuda_graphs: bool = True
    fused: bool = True
    # Whether models that are not fused go through torch.compile on a GPU. Null: where the model can be
    # compiled as one graph; true insists. Never under bitwise: the compiler picks kernels by their speed.
    compile: Optional[bool] = None
    # What computes prompt chunks on a GPU. `auto`: FlashAttention-3 where a package of it is installed and
    # a small call of it comes out right, else our own kernels in Triton; always those under bitwise.
    attention_kernel: AttentionKernel = AttentionKernel.auto
    prefix_sharing: bool = True
    # Slots that must be free before waiting rows are let in, unless few rows run: a step with prompt
    # chunks costs more than one without. Null: 1 on the CPU, a sixteenth of max_num_seqs on a GPU.
    admission_batch: Optional[int] = None
    # Rows pulled ahead of admission, and whether the one that may become longest is let in first, so
    # that no tail of long rows runs alone at the end. Null: max_num_seqs and no on the CPU, four times
    # as many and yes on a GPU.
    lookahead: Optional[int] = None
    longest_first: Optional[bool] = None
    # Record what host and device did in a window of timeline_steps steps, as <output.dir>/timeline/. The
    # first timeline_after are left out: they compute whole prompts, and everything in them happens for
    # the first time. The window shows whether later steps alternate evenly; a picture has room for few.
    timeline: bool = False
    timeline_steps: int = 40
    timeline_after: int = 20
    # Share of a row's still possible tokens that admission sets memory aside for. At 1 no row is
    # ever preempted; below, more rows run at once and some may have to be recomputed.
    reserve: float = 1.0

    def __post_init__(self) -> None:
        _at_least("engine.max_num_seqs", self.max_num_seqs, 1)
        _at_least("engine.max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("engine.block_size", self.block_size, 1)
        if self.block_size > 1024:
            raise ValueError(f"engine.block_size={self.block_size} is too large: use 1024 or less")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"engine.gpu_memory_utilization={self.gpu_memory_utilization} is a share: use more than 0 "
                "and at most 1"
            )
        if not self.kv_cache_gb > 0:
            raise ValueError(f"engine.kv_cache_gb={self.kv_cache_gb} must be more than 0")
        _at_least("engine.num_blocks", self.num_blocks, 2)
        _at_least("engine.admission_batch", self.admission_batch, 1)
        _at_least("engine.lookahead", self.lookahead, 1)
        _at_least("engine.timeline_steps", self.timeline_steps, 1)
        _at_least("engine.timeline_after", self.timeline_after, 0)
        if not 0 <= self.reserve <= 1:
            raise ValueError(f"engine.reserve={self.reserve} is a share: use a number from 0 to 1")
        if self.determinism is Determinism.bitwise:
            if self.compile:
                raise ValueError(
                    "engine.compile=true is not to be had with engine.determinism=bitwise: leave it at null, "
                    "or use engine.determinism=fast"
                )
            if self.attention_kernel is AttentionKernel.flash_attention_3:
                raise ValueError(
                    "engine.attention_kernel=flash_attention_3 is not to be had with "
                    "engine.determinism=bitwise: leave it at auto, or use engine.determinism=fast"
                )


# Settings that only the native engine has a use for, with their defaults.
_NATIVE_ONLY: dict[str, Any] = {
    "timeline": False,
    "timeline_steps": 40,
    "timeline_after": 20,
    "admission_batch": None,
    "lookahead": None,
    "longest_first": None,
    "fused": True,
    "compile": None,
    "attention_kernel": AttentionKernel.auto,
}


@dataclass
class TransformersEngineConfig(EngineConfig):
    """transformers' own continuous batching: for models that the native engine cannot run, and to compare.

    Sizes mean what they mean there: block_size is its page, num_blocks the blocks of its cache.
    mode=async needs a GPU; on the CPU it runs in step, whatever the mode. cuda_graphs are there with
    flash attention; without it, transformers decides.
    """

    block_size: int = 256
    # `auto`: on the CPU sdpa, or eager for a model that has none; on a GPU FlashAttention-3 if the package
    # flash-attn-3 or fa3-fwd is there and the GPU has it, else what transformers finds best.
    attention: Attention = Attention.auto

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least("engine.block_size", self.block_size, 4)
        refused = (
            (
                "determinism",
                self.determinism is Determinism.bitwise,
                "its logits change in the last bits with the batch; use engine.determinism=auto",
            ),
            ("reserve", self.reserve != 1.0, "it admits rows while blocks are free; leave it at 1"),
            *(
                (
                    name,
                    getattr(self, name) != default,
                    f"leave it at {_as_typed(default)}",
                )
                for name, default in _NATIVE_ONLY.items()
            ),
        )
        for name, wrong, remedy in refused:
            if wrong:
                value = _as_typed(getattr(self, name))
                raise ValueError(
                    f"engine.{name}={value} is not to be had with engine=transformers: {remedy}, "
                    "or use engine=native"
                )


def _as_typed(value: Any) -> str:
    """A value as the user writes it."""
    if value is None:
        return "null"
    return str(value.value if isinstance(value, Enum) else value).lower()


@dataclass
class SamplingConfig:
    """Null means: the model's own value under `defaults: model`, else the neutral one."""

    defaults: SamplingDefaults = SamplingDefaults.model
    temperature: Optional[float] = None
    top_k: Optional[int] = None
    top_p: Optional[float] = None
    min_p: Optional[float] = None
    max_tokens: int = 256
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    # Prompt and completion; above 1 makes repetition less likely. Null takes the model's own value.
    repetition_penalty: Optional[float] = None
    # Completion only: subtracted from a token's logit if it occurred, or for each occurrence.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Token id -> number added to its logit, e.g. {15: -2.5}.
    logit_bias: Any = None
    # Words that must not occur, each also with a space before it.
    bad_words: list[str] = field(default_factory=list)
    n: int = 1
    # A column of structs, or of JSON objects, with values of these keys for single rows.
    column: Optional[str] = None


@dataclass
class OutputConfig:
    dir: str = REQUIRED
    # Input columns carried into the output; null carries all, [] none.
    columns: Optional[list[str]] = None
    prompt: bool = True
    prompt_ids: bool = False
    completion_ids: bool = False
    logprobs: bool = False
    # Alternatives per token (0: none), with their log-probabilities and the mass left over.
    topk: int = 0
    topk_dtype: TopkDtype = TopkDtype.float16
    commit_interval_s: float = 5.0
    # The same for a remote `dir` (s3://…), where each commit makes two objects.
    upload_interval_s: float = 60.0
    # For a remote `dir`: as fsspec takes them, and a folder on a disk of this machine for what waits to go
    # up and for copies of parts; null: below the system's temporary folder.
    storage_options: Any = None
    stage_dir: Optional[str] = None
    max_part_bytes: int = 512 * 2**20
    # Generate again the rows that ended as errors.
    retry_errors: bool = False

    def __post_init__(self) -> None:
        _at_least("output.topk", self.topk, 0)
        for name in ("commit_interval_s", "upload_interval_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"output.{name}={getattr(self, name)} must be 0 or more seconds")
        mapping("output.storage_options", self.storage_options)
        _at_least("output.max_part_bytes", self.max_part_bytes, 1)
        if (self.logprobs or self.topk) and not self.completion_ids:
            raise ValueError(
                "output.logprobs and output.topk speak of completion_ids, which are not written: "
                "set output.completion_ids=true"
            )


@dataclass
class CostConfig:
    gpu_hour_usd: float = 5.0
    # Stop cleanly once this much is spent; the same command with more goes on.
    max_usd: Optional[float] = None

    def __post_init__(self) -> None:
        if not self.gpu_hour_usd >= 0:
            raise ValueError(f"cost.gpu_hour_usd={self.gpu_hour_usd} must be 0 or more dollars")
        if self.max_usd is not None and not self.max_usd > 0:
            raise ValueError(f"cost.max_usd={self.max_usd} must be more than 0, or null")


@dataclass
class ClusterConfig:
    """How workers on one output.dir see each other. The defaults suit a shared file system."""

    # Seconds between two signs of life.
    heartbeat_s: float = 5.0
    # A worker that gave none for so long, as another one's clock tells, loses its units.
    lease_s: float = 60.0
    # A worker gives none once its engine has stood still for so long; loading the model counts too.
    stall_s: float = 600.0
    # Least seconds between two looks at the others, for a worker that has nothing to do.
    poll_s: float = 1.0
    # Seconds this process may run; null: what Slurm says (SLURM_JOB_END_TIME), else no limit.
    time_limit_s: Optional[float] = None
    # Another life for this task of a Slurm array if its time was up with work left: how to ask for it, and
    # how many lives before it, whatever ended them, are too many.
    requeue: Requeue = Requeue.never
    max_restarts: int = 20

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "lease_s", "stall_s", "poll_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"cluster.{name}={getattr(self, name)} must be more than 0 seconds")
        _at_least("cluster.max_restarts", self.max_restarts, 0)
        if self.lease_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"cluster.lease_s={self.lease_s} must be at least three times cluster.heartbeat_s="
                f"{self.heartbeat_s}, or the living are taken for dead: raise it, or lower the other"
            )
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise ValueError(f"cluster.time_limit_s={self.time_limit_s} must be more than 0, or null")


@dataclass
class LauncherConfig:
    """How many processes one command line starts."""

    # `none`: this one alone. `local`: workers on this machine that share the job.
    kind: LauncherKind = LauncherKind.none
    # Null: one for each visible GPU. On GPUs a smaller number leaves the last of them alone.
    num_workers: Optional[int] = None

    def __post_init__(self) -> None:
        _at_least("launcher.num_workers", self.num_workers, 1)


@dataclass
class ReportConfig:
    # Seconds between lines where standard error is not a terminal.
    interval_s: float = 10.0
    # Completions shown at the end, and the input column with the right answer, if there is one.
    show_completions: int = 3
    expected_column: Optional[str] = None

    def __post_init__(self) -> None:
        _at_least("report.show_completions", self.show_completions, 0)
        if not self.interval_s > 0:
            raise ValueError(f"report.interval_s={self.interval_s} must be more than 0 seconds")


@dataclass
class BenchConfig:
    """A measurement of the engine instead of a job: no rows are read, no completions written.

    Null for rows and new_tokens: as the workload has them.
    """

    # A: 32 rows, 128-token prompts, 8,192 new tokens. B: 512 new tokens. C: 1,024 rows of mixed lengths.
    workload: Optional[Workload] = None
    rows: Optional[int] = None
    # New tokens of every row.
    new_tokens: Optional[int] = None
    # Timed runs, after one to warm up.
    repetitions: int = 3

    def __post_init__(self) -> None:
        _at_least("bench.rows", self.rows, 1)
        _at_least("bench.new_tokens", self.new_tokens, 1)
        _at_least("bench.repetitions", self.repetitions, 1)


@dataclass
class JobConfig:
    """A whole job. `seed` feeds the sampling draws and the shuffle."""

    source: SourceConfig = REQUIRED
    prompt: PromptConfig = REQUIRED
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    seed: int = 0


def mapping(key: str, value: Any) -> dict[str, Any]:
    """The value of a key that holds a mapping or null. Raises ValueError naming the key."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{key}={value!r} is no mapping: write it as '{key}={{name: value}}'")
    return {str(name): item for name, item in value.items()}


def _at_least(key: str, value: Optional[int], least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"{key}={value} is too small: use {least} or more")
