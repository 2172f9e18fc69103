"""transformers' own engine behind our interface: the same tokens, refusals by name, nothing left behind."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import (
    EOS_IDS,
    SHIPPED,
    VOCABULARY,
    _questions,
    by_key,
    family_config,
    letter_tokenizer,
    mixed_prompts,
    random_model,
    request,
    shipped_model,
    shipped_tokenizer,
)
from transformers import (
    Gemma2Config,
    GenerationConfig,
    GPT2Config,
    MambaConfig,
    Phi3Config,
    Qwen3NextConfig,
    T5Config,
)

from pipeline.config import (
    Attention,
    Determinism,
    EngineConfig,
    EngineMode,
    JobConfig,
    ModelConfig,
    OutputConfig,
    ParquetSource,
    PromptConfig,
    SamplingConfig,
    TransformersEngineConfig,
)
from pipeline.engine import Completion, Engine, FinishReason, Request, RowKey, SamplingParams
from pipeline.engine.continuous_batching import num_cache_blocks, runs_async
from pipeline.engine.transformers_backend import TransformersEngine
from pipeline.engine.transformers_limits import why_not
from pipeline.models.architecture import UnsupportedModel
from pipeline.models.load import LoadedModel, load_model, wrap_model
from pipeline.models.transformers_model import inspect_for_transformers, wrap_for_transformers
from pipeline.request import Refusal, RowError

GREEDY = SamplingParams(temperature=0.0)


def settings(**config: Any) -> TransformersEngineConfig:
    """Pages of 16, so that short rows already have several."""
    return TransformersEngineConfig(**{"block_size": 16, "kv_cache_gb": 0.02, **config})


@cache
def shipped() -> LoadedModel:
    return wrap_for_transformers(shipped_model(), settings(), tokenizer=shipped_tokenizer())


def family_model(family: str) -> Any:
    model = random_model(family_config(family))
    model.generation_config = GenerationConfig(eos_token_id=list(EOS_IDS))
    return model


@cache
def llama() -> LoadedModel:
    return wrap_for_transformers(family_model("llama"), settings())


def engine(loaded: LoadedModel, sampling: SamplingParams = GREEDY, **config: Any) -> TransformersEngine:
    return TransformersEngine(loaded, settings(**config), sampling=sampling)


def rows(count: int = 8, **params: Any) -> list[Request]:
    return [request(i, p, **{"max_tokens": 9, **params}) for i, p in enumerate(mixed_prompts(count))]


@cache
def greedy(count: int = 8) -> dict[tuple[RowKey, int], list[int]]:
    """What becomes of `rows(count)`."""
    return tokens(engine(llama()).generate(rows(count)))


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """Every manager collects garbage as it ends; what was imported need not be walked through each time."""
    gc.freeze()
    yield
    gc.unfreeze()


def tokens(completions: Iterator[Completion]) -> dict[tuple[RowKey, int], list[int]]:
    return {key: c.token_ids.tolist() for key, c in by_key(completions).items()}


class TestSameAsNative:
    @pytest.mark.parametrize(
        "config",
        [
            {},
            {"max_num_seqs": 3, "max_num_batched_tokens": 24},
            {"prefix_sharing": False, "mode": EngineMode.sync, "attention": Attention.eager},
        ],
        ids=["default", "chunked", "eager"],
    )
    def test_greedy_rows_of_the_shipped_model(self, config: dict[str, Any], native: Any) -> None:
        asked, expected = native
        loaded = shipped()
        if "attention" in config:
            loaded = wrap_for_transformers(shipped_model(), settings(**config), tokenizer=shipped_tokenizer())
        got = by_key(engine(loaded, **config).generate(asked))
        assert got.keys() == expected.keys()
        for key, completion in got.items():
            other = expected[key]
            assert completion.token_ids.tolist() == other.token_ids.tolist()
            assert completion.token_ids.dtype == np.int32
            assert (completion.text, completion.finish_reason) == (other.text, other.finish_reason)
            assert completion.request is other.request
        reasons = {c.finish_reason for c in got.values()}
        assert reasons == {FinishReason.STOP, FinishReason.LENGTH}

    @pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
    def test_greedy_rows_of_random_models_and_their_logprobs(self, family: str) -> None:
        """mistral's rows reach past its window."""
        model = family_model(family)
        native = Engine(wrap_model(copy.deepcopy(model)), EngineConfig(kv_cache_gb=0.1), logprobs=True)
        asked = rows(12, max_tokens=24, logprobs=True)
        expected = by_key(native.generate(asked))
        sampling = replace(GREEDY, logprobs=True)
        got = by_key(engine(wrap_for_transformers(model, settings()), sampling).generate(asked))
        assert got.keys() == expected.keys()
        for key, completion in got.items():
            assert completion.token_ids.tolist() == expected[key].token_ids.tolist()
            assert completion.logprobs is not None and completion.logprobs.dtype == np.float32
            np.testing.assert_allclose(completion.logprobs, expected[key].logprobs, atol=1e-4)

    def test_a_row_that_is_sent_back_for_want_of_memory_loses_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from transformers.generation.continuous_batching.requests import RequestState

        sent_back, reset = [], RequestState.create_equivalent_initial_request

        def noted(self: Any) -> Any:
            sent_back.append(self.generated_len())
            return reset(self)

        monkeypatch.setattr(RequestState, "create_equivalent_initial_request", noted)
        sampling = replace(GREEDY, logprobs=True)
        asked = [request(i, [7 + i] * 9, max_tokens=60, ignore_eos=True, logprobs=True) for i in range(6)]
        # Six rows of five pages each.
        roomy, tight = (by_key(engine(llama(), sampling, num_blocks=n).generate(asked)) for n in (40, 12))
        assert any(sent_back)
        for key, completion in tight.items():
            assert completion.token_ids.tolist() == roomy[key].token_ids.tolist()
            assert completion.logprobs is not None and len(completion.logprobs) == 60
            np.testing.assert_allclose(completion.logprobs, roomy[key].logprobs, atol=1e-4)

    def test_each_request_has_limits_and_stops_of_its_own(self) -> None:
        prompt = mixed_prompts(12)[11]
        (free,) = engine(llama()).generate([request(0, prompt, max_tokens=12, ignore_eos=True)])
        assert len(free.token_ids) == 12 and free.finish_reason is FinishReason.LENGTH
        ids = free.token_ids.tolist()
        third = next(i for i in range(3, 12) if ids[i] not in ids[:i])
        asked = [
            request(0, prompt, max_tokens=5, ignore_eos=True),
            request(1, prompt, max_tokens=12, ignore_eos=True, stop_token_ids=(ids[third],)),
            request(2, np.resize(prompt, llama().max_model_len - 3), max_tokens=50, ignore_eos=True),
            request(3, prompt[:1], max_tokens=1, ignore_eos=True),
        ]
        done = {key.row: c for (key, _), c in by_key(engine(llama()).generate(asked)).items()}
        assert done[0].token_ids.tolist() == ids[:5]
        assert done[1].token_ids.tolist() == ids[: third + 1]
        assert [done[r].finish_reason.value for r in range(4)] == ["length", "stop", "length", "length"]
        assert (len(done[2].token_ids), len(done[3].token_ids)) == (3, 1)


@pytest.fixture(scope="module")
def native() -> tuple[list[Request], dict[tuple[RowKey, int], Completion]]:
    """24 questions, and what our engine makes of them."""
    prompts = _questions(shipped_tokenizer())[::2][:24]
    asked = [request(i, p, max_tokens=(4, 40)[i % 2]) for i, p in enumerate(prompts)]
    loaded = load_model(ModelConfig(path=str(SHIPPED)), shipped_tokenizer())
    return asked, by_key(Engine(loaded, EngineConfig(kv_cache_gb=0.05)).generate(asked))


class TestDraws:
    @pytest.mark.parametrize(
        "params", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999999}, {"temperature": 1e-4}]
    )
    def test_a_filter_that_leaves_one_token_is_greedy(self, params: dict[str, Any]) -> None:
        params = {"temperature": 1.0, **params}
        got = tokens(engine(llama(), SamplingParams(**params)).generate(rows(**params)))
        assert got == greedy()

    def test_samples_of_a_row_are_drawn_apart(self) -> None:
        params = {"temperature": 1.5, "max_tokens": 20, "ignore_eos": True}
        asked = rows(3, samples=(0, 1, 3), **params)
        got = tokens(engine(llama(), SamplingParams(temperature=1.5, n=3)).generate(asked))
        assert got.keys() == {(RowKey(0, r), s) for r in range(3) for s in (0, 1, 3)}
        assert len({tuple(ids) for ids in got.values()}) == 9
        # A process that goes on after another must not draw the same again.
        assert got != tokens(engine(llama(), SamplingParams(temperature=1.5, n=3)).generate(asked))

    def test_padding_of_the_vocabulary_is_never_drawn(self) -> None:
        tokenizer = letter_tokenizer()
        tokenizer.pieces = tokenizer.pieces[: VOCABULARY // 2]
        loaded = wrap_for_transformers(family_model("llama"), settings(), tokenizer=tokenizer)
        params = {"temperature": 3.0, "max_tokens": 30, "ignore_eos": True}
        short, whole = (
            max(max(ids) for ids in tokens(each.generate(rows(**params))).values())
            for each in (engine(m, SamplingParams(temperature=3.0)) for m in (loaded, llama()))
        )
        assert short < VOCABULARY // 2 <= whole


class TestRefusals:
    @pytest.mark.parametrize(
        ("params", "said"),
        [
            ({"stop": ("\n\n",)}, "sampling.stop=['\\n\\n']"),
            ({"min_tokens": 3}, "sampling.min_tokens=3"),
            ({"repetition_penalty": 1.1}, "sampling.repetition_penalty=1.1"),
            ({"presence_penalty": 0.5}, "sampling.presence_penalty=0.5"),
            ({"frequency_penalty": 0.5}, "sampling.frequency_penalty=0.5"),
            ({"logit_bias": ((3, 1.0),)}, "sampling.logit_bias="),
            ({"bad_words_ids": ((3, 4),)}, "sampling.bad_words="),
            ({"top_logprobs": 5}, "output.topk=5"),
            ({"logprobs": True, "temperature": 0.7}, "output.logprobs=true"),
            ({"logprobs": True, "temperature": 1.0, "top_p": 0.9}, "output.logprobs=true"),
        ],
    )
    def test_what_it_cannot_sample(self, params: dict[str, Any], said: str) -> None:
        reason = why_not(SamplingParams(**params))
        assert reason is not None and reason.startswith(said)
        assert "engine=transformers" in reason and "engine=native" in reason and "set " in reason
        with pytest.raises(ValueError, match="engine=native"):
            engine(llama(), SamplingParams(**params))

    @pytest.mark.parametrize(
        "params",
        [
            {},
            {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "max_tokens": 3, "n": 4},
            {"stop_token_ids": (3,), "ignore_eos": True},
            {"logprobs": True},
            {"logprobs": True, "temperature": 0.0, "top_p": 0.9},
        ],
    )
    def test_what_it_can(self, params: dict[str, Any]) -> None:
        assert why_not(SamplingParams(**params)) is None

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ({"determinism": Determinism.bitwise}, r"engine\.determinism=bitwise .*engine\.determinism=auto"),
            ({"reserve": 0.5}, r"engine\.reserve=0\.5 .*leave it at 1"),
            ({"longest_first": True}, r"engine\.longest_first=true .*leave it at null"),
            ({"timeline": True}, r"engine\.timeline=true .*leave it at false"),
            ({"timeline_steps": 8}, r"engine\.timeline_steps=8 .*leave it at 40"),
            ({"fused": False}, r"engine\.fused=false .*leave it at true"),
            ({"block_size": 2}, r"engine\.block_size=2 .*4 or more"),
        ],
    )
    def test_settings_of_the_native_engine(self, config: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            TransformersEngineConfig(**config)

    def test_a_cache_for_nothing(self) -> None:
        with pytest.raises(ValueError, match=r"engine\.kv_cache_gb=1e-06 holds no block of 16 tokens"):
            engine(llama(), kv_cache_gb=1e-6)

    @pytest.mark.parametrize(
        ("hf_config", "said"),
        [
            (Gemma2Config(), "attn_logit_softcapping.*engine=native"),
            (Qwen3NextConfig(), "layers of type linear_attention"),
            (T5Config(), "encoder-decoder"),
            (MambaConfig(), "mamba has no attention heads"),
            (
                Phi3Config(
                    max_position_embeddings=131072,
                    original_max_position_embeddings=4096,
                    rope_parameters={
                        "rope_type": "longrope",
                        "rope_theta": 10000.0,
                        "short_factor": [1.0] * 48,
                        "long_factor": [2.0] * 48,
                        "original_max_position_embeddings": 4096,
                    },
                    pad_token_id=None,
                ),
                r"longrope RoPE.*model\.max_model_len=4096",
            ),
        ],
        ids=lambda value: getattr(value, "model_type", None),
    )
    def test_models_without_a_look_at_weights(self, hf_config: Any, said: str, tmp_path: Path) -> None:
        """There are none to be read."""
        hf_config.save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match=said):
            inspect_for_transformers(ModelConfig(path=str(tmp_path)), TransformersEngineConfig())

    def test_flash_attention_on_a_cpu_and_a_row_too_long_for_the_model(self) -> None:
        flash = TransformersEngineConfig(attention=Attention.flash_attention_2)
        with pytest.raises(ValueError, match=r"engine\.attention=flash_attention_2 needs a GPU"):
            inspect_for_transformers(ModelConfig(path=str(SHIPPED)), flash)
        with pytest.raises(ValueError, match=r"model\.max_model_len=1000000 is past"):
            inspect_for_transformers(
                ModelConfig(path=str(SHIPPED), max_model_len=10**6), TransformersEngineConfig()
            )

    def test_a_model_with_other_names_for_its_sizes(self, tmp_path: Path) -> None:
        GPT2Config(n_layer=3, n_head=4, n_embd=32, n_positions=77).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="has no weights"):
            inspect_for_transformers(ModelConfig(path=str(tmp_path)), TransformersEngineConfig())


class TestRows:
    def test_refusals_pass_straight_through_and_bad_rows_leave_the_others_alone(self) -> None:
        good, limit = rows(4), llama().max_model_len
        error = RowError("prompt_invalid", "the column is empty")
        asked = [
            replace(request(50, [], samples=(0, 2)), refusal=Refusal(FinishReason.ERROR, error)),
            good[0],
            replace(request(51, []), refusal=Refusal(FinishReason.SKIPPED)),
            request(52, np.ones(limit)),
            request(53, []),
            request(54, [1, VOCABULARY, 2]),
            request(55, [-1]),
            request(56, [1], stop=("a",)),
            request(57, [1], temperature=0.5),
            request(58, np.ones(200), max_tokens=100),
            *good[1:],
        ]
        # 17 pages of 16 hold 272 tokens.
        found = by_key(engine(llama(), num_blocks=17).generate(asked))
        assert len(found) == 14
        codes = {key.row: c.error.code for (key, _), c in found.items() if c.error is not None}
        assert codes == {
            50: "prompt_invalid",
            52: "prompt_too_long",
            53: "prompt_invalid",
            54: "prompt_invalid",
            55: "prompt_invalid",
            56: "sampling_unsupported",
            57: "sampling_unsupported",
            58: "row_exceeds_kv_cache",
        }
        assert found[(RowKey(0, 50), 2)].error is error
        assert found[(RowKey(0, 51), 0)].finish_reason is FinishReason.SKIPPED
        message = str(found[(RowKey(0, 57), 0)].error)
        assert "sampling.temperature=0.5" in message and "0.0 for the others" in message
        assert all(found[key].token_ids.tolist() == ids for key, ids in greedy(4).items())

    def test_requests_are_pulled_as_rows_end(self) -> None:
        pulled = 0

        def counted() -> Iterator[Request]:
            nonlocal pulled
            for each in rows(40, max_tokens=6, ignore_eos=True):
                pulled += 1
                yield each

        for done, _ in enumerate(engine(llama(), max_num_seqs=2).generate(counted())):
            assert pulled <= done + 4
        assert pulled == 40

    def test_a_slow_tokeniser_is_not_waited_for_while_rows_run(self) -> None:
        class Slow:
            """The second request is ready only once the first has come back."""

            def __init__(self) -> None:
                self.finished = threading.Event()
                self.left = rows(2)

            def ready(self) -> bool:
                return len(self.left) == 2 or self.finished.is_set()

            def __iter__(self) -> Iterator[Request]:
                yield self.left.pop()
                assert self.finished.is_set(), "waited for"
                yield self.left.pop()

        slow, got = Slow(), []
        for completion in engine(llama()).generate(slow):
            slow.finished.set()
            got.append(completion)
        assert len(got) == 2

    def test_a_row_that_the_manager_refuses_is_a_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.generation.continuous_batching.scheduler import Scheduler

        healthy = Scheduler.add_waiting_request

        def add(self: Any, state: Any) -> None:
            if state.request_id == "1":
                raise TypeError("not this one")
            healthy(self, state)

        monkeypatch.setattr(Scheduler, "add_waiting_request", add)
        found = by_key(engine(llama()).generate(rows(4)))
        errors = {key.row: str(c.error) for (key, _), c in found.items() if c.error is not None}
        assert errors == {1: "generation_failed: not this one"}
        assert len(found) == 4


def fail_at(loaded: LoadedModel, step: int, error: Exception) -> Callable[[], None]:
    """Let the model raise at its step-th forward pass from now on; the returned function mends it."""
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls >= step:
            raise error

    return loaded.model.register_forward_pre_hook(hook).remove


class TestEnds:
    @pytest.mark.parametrize("step", [1, 4, 14])
    def test_an_error_in_the_manager_reaches_the_caller(self, step: int) -> None:
        expected = greedy(12)
        broken, before, got = engine(llama(), max_num_seqs=4), threading.active_count(), []
        mend = fail_at(llama(), step, MemoryError("no memory for the step"))
        try:
            with pytest.raises(RuntimeError, match="MemoryError: no memory for the step.*still") as caught:
                for completion in broken.generate(rows(12)):
                    got.append(completion)
        finally:
            mend()
        assert isinstance(caught.value.__cause__, MemoryError)
        assert threading.active_count() == before
        # Rows that ended before are delivered and whole; the others are not made out to be done.
        assert all(c.token_ids.tolist() == expected[(c.request.key, c.sample)] for c in got)
        assert len(got) < 12 and (step < 14 or got)
        assert tokens(broken.generate(rows(12))) == expected

    def test_an_error_while_nothing_is_asked_of_it_reaches_the_caller_too(self) -> None:
        """It dies while the caller is busy; the next row handed over must not vanish."""
        completions = engine(llama(), max_num_seqs=1).generate(rows(6, ignore_eos=True))
        next(completions)
        mend = fail_at(llama(), 1, RuntimeError("gone"))
        try:
            thread = next(t for t in threading.enumerate() if "_run_generation_loop" in repr(t))
            thread.join(20)
            assert not thread.is_alive()
            with pytest.raises(RuntimeError, match="gone"):
                list(completions)
        finally:
            mend()

    def test_an_error_in_the_requests_reaches_the_caller(self) -> None:
        def broken() -> Iterator[Request]:
            yield from rows(3)
            raise OSError("the disk went away")

        before, mended = threading.active_count(), engine(llama())
        with pytest.raises(OSError, match="the disk went away"):
            list(mended.generate(broken()))
        assert threading.active_count() == before
        assert len(list(mended.generate(rows(3)))) == 3

    def test_closing_early_stops_the_thread_and_frees_the_cache(self) -> None:
        before, closed = threading.active_count(), engine(llama(), max_num_seqs=4)
        asked = [request(0, [1], max_tokens=1)]
        asked += [request(i, [i], max_tokens=400, ignore_eos=True) for i in range(1, 8)]
        completions, steps = closed.generate(asked), 0

        def count(*_: Any) -> None:
            nonlocal steps
            steps += 1

        counting = llama().model.register_forward_pre_hook(count)
        next(completions)
        stats = closed.stats
        assert 0 < stats.num_running <= 4 and stats.num_waiting > 0 and 0 < stats.kv_use < 1
        assert closed._batching is not None
        kept = weakref.ref(closed._batching._manager.batch_processor.cache)
        with pytest.raises(RuntimeError, match="already generating"):
            next(closed.generate(rows(1)))
        completions.close()  # type: ignore[attr-defined]
        counting.remove()
        # Nobody waits for rows that nobody will see.
        assert steps < 400
        gc.collect()
        assert kept() is None
        assert threading.active_count() == before
        stats = closed.stats
        assert (stats.num_running, stats.num_waiting, stats.kv_use) == (0, 0, 0.0)
        assert tokens(closed.generate(rows())) == greedy()

    def test_told_to_stop(self) -> None:
        stopped, asked = engine(llama(), max_num_seqs=2), []
        got = list(stopped.generate(rows(12), lambda: len(asked) >= 3 or asked.append(1) is not None))
        assert len(got) < 12
        assert len(list(stopped.generate(rows(12)))) == 12

    def test_a_session_keeps_its_manager(self) -> None:
        kept = engine(llama(), max_num_seqs=4)
        with kept.session():
            manager = kept._batching
            assert tokens(kept.generate(rows())) == greedy()
            steps = kept.stats.num_steps
            # What is dropped half-way does not turn up among the next one's rows.
            early = kept.generate([request(20, [1], max_tokens=1), *rows(6, max_tokens=300, ignore_eos=True)])
            next(early)
            early.close()  # type: ignore[attr-defined]
            assert tokens(kept.generate(rows())) == greedy()
            assert kept.stats.num_steps > steps > 0 and kept._batching is manager
            with pytest.raises(RuntimeError, match="has a session"), kept.session():
                pass
        assert kept._batching is None and kept.stats.num_steps == 0
        assert tokens(kept.generate(rows())) == greedy()

    def test_no_requests_at_all(self) -> None:
        assert list(engine(llama()).generate([])) == []


class TestJobs:
    def test_the_demo_is_complete_and_knows_its_backend(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from pipeline.job import run_job
        from pipeline.prepare import prepare
        from pipeline.verify import main as verify

        config = demo(output=OutputConfig(dir=str(tmp_path / "out")))
        outcome = run_job(config)
        assert outcome.exit_code == 0
        assert outcome.summary().rows_by_reason == {"stop": 300}
        assert verify([config.output.dir]) == 0
        said = capsys.readouterr()
        assert "complete: 300 results" in said.out
        assert "transformers 5." in said.err and "draws not repeatable" in said.err
        with pytest.raises(ValueError, match=r"engine\.backend: transformers → native"):
            prepare(replace(config, engine=EngineConfig()))

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"sampling": SamplingConfig(column="knobs")}, r"sampling\.column=knobs .*sampling\.column=null"),
            ({"sampling": SamplingConfig(stop=["\n"])}, r"sampling\.stop="),
            ({"sampling": SamplingConfig(repetition_penalty=1.2)}, r"sampling\.repetition_penalty=1\.2"),
            ({"output": {"topk": 3}}, r"output\.topk=3"),
        ],
    )
    def test_a_job_is_refused_before_anything_is_written(
        self, changes: dict[str, Any], said: str, tmp_path: Path
    ) -> None:
        from pipeline.prepare import prepare

        output = OutputConfig(dir=str(tmp_path / "out"), completion_ids=True, **changes.pop("output", {}))
        with pytest.raises(ValueError, match=said):
            prepare(replace(demo(output=output), **changes))
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["engine.attention=sdpa"], ["engine.attention", "engine=native has no use for it"]),
        (["engine=transformers", "engine.fused=false"], ["engine.fused=false", "engine=native"]),
        (["engine=transformers", "engine.attention=quick"], ["engine.attention", "quick", "sdpa"]),
    ],
)
def test_a_mistake_on_the_command_line_is_named(command: Any, arguments: list[str], said: list[str]) -> None:
    result = command(*arguments)
    assert (result.code, result.jobs) == (1, [])
    assert all(words in result.err for words in said)


def demo(output: OutputConfig) -> JobConfig:
    """What `conf=demo engine=transformers` comes to."""
    assets = SHIPPED.parent
    return JobConfig(
        source=ParquetSource(path=str(assets / "demo_prompts.parquet"), unit_rows=50),
        prompt=PromptConfig(column="prompt"),
        model=ModelConfig(path=str(SHIPPED)),
        engine=TransformersEngineConfig(),
        sampling=SamplingConfig(max_tokens=128),
        output=output,
    )


def test_async_is_for_gpus() -> None:
    for mode in EngineMode:
        assert not runs_async(mode, torch.device("cpu"))
    assert runs_async(EngineMode.async_, torch.device("cuda"))
    assert not runs_async(EngineMode.sync, torch.device("cuda"))


def test_the_cache_is_as_large_as_asked_and_no_larger_than_of_use() -> None:
    a = llama().architecture
    block = 16 * 2 * a.num_layers * a.num_kv_heads * a.head_dim * 4
    assert num_cache_blocks(llama(), settings(kv_cache_gb=10 * block / 2**30)) == 10
    assert num_cache_blocks(llama(), settings(num_blocks=7)) == 7
    assert num_cache_blocks(llama(), settings(kv_cache_gb=100.0, max_num_seqs=2)) == 2 + 4 * (512 // 16)
