"""Penalties, bias, bad words and early stops equal transformers' processors and vLLM's definitions.

Rows are put into a sequence table and read back as a step reads them, so that what the host gathers
is compared together with what the device makes of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from fakes import (
    EOS_IDS,
    VOCABULARY,
    FixedDraws,
    by_key,
    family_config,
    loaded_family,
    make_engine,
    mixed_prompts,
    random_model,
    request,
)
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.config import EngineMode
from pipeline.engine import Request, RowKey
from pipeline.engine.logit_processors import process_logits
from pipeline.engine.philox import sequence_key, uniforms
from pipeline.engine.sampler import Sampler
from pipeline.engine.sampling_inputs import SamplingInputs, build_sampling_inputs
from pipeline.engine.scheduler import Schedule
from pipeline.engine.sequence import SequenceTable, make_sequence

V = 40
STOPS = (3, 17)


@dataclass(frozen=True)
class Case:
    """A row of a step: its prompt, what it has generated so far, and its knobs."""

    prompt: list[int]
    completion: list[int]
    params: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.completion


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def histories(count: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Ragged: prompts of 1 to 30 ids, completions of 0 to 20; few distinct ids, so that many recur."""
    rng = np.random.default_rng(seed)
    lengths = [(1, 0), (1, 1), (30, 20), (30, 0), (2, 20)]
    lengths += [(int(rng.integers(1, 31)), int(rng.integers(0, 21))) for _ in range(count)]
    return [(rng.integers(0, 12, p).tolist(), rng.integers(6, 20, c).tolist()) for p, c in lengths[:count]]


def step(cases: Sequence[Case], carried: bool = False) -> tuple[SamplingInputs, torch.Tensor]:
    """What a step over these rows knows of them, and their newest tokens.

    carried: what a row sampled last is on the device only, and the host has something else in its place.
    """
    # In the middle of their prompts: nothing is sampled for them, and nothing of theirs may show.
    bystander = Case([9, 9, 9, 9], [], {"presence_penalty": 9.0, "logit_bias": ((1, 50.0),)})
    everyone = [bystander, *cases, bystander]
    table = SequenceTable(len(everyone))
    table.tokens[:] = 7
    # From the last to the first, so that a row's slot is not its place in the step.
    slots = [table.place(_sequence(case, carried)) for case in reversed(everyone)][::-1]
    lengths = np.array([len(case.tokens) for case in everyone], np.int32)
    # Rows that decode compute their newest token, the others the rest of their prompt.
    counts = np.array([1 if case.completion else 1 + len(case.prompt) // 2 for case in everyone], np.int32)
    sampled = np.array([case is not bystander for case in everyone])
    schedule = Schedule(
        slots=np.array(slots, np.int32),
        epochs=np.zeros(len(slots), np.int64),
        starts=np.where(sampled, lengths - counts, 0).astype(np.int32),
        query_lens=counts,
        sampled=sampled,
        carried=sampled & carried & np.array([bool(case.completion) for case in everyone]),
    )
    return build_sampling_inputs(schedule, table), torch.tensor([case.tokens[-1] for case in cases])


def _sequence(case: Case, carried: bool) -> Any:
    asked = request(0, case.prompt, **{"max_tokens": 64, **case.params})
    sequence = make_sequence(
        asked, 0, seed=0, max_model_len=256, eos_ids=STOPS, matcher=None, block_hashes=[]
    )
    known = len(case.tokens) - (carried and bool(case.completion))
    sequence.tokens = np.array(case.tokens[:known], np.int32)
    return sequence


def ours(cases: Sequence[Case], logits: torch.Tensor, carried: bool = False) -> torch.Tensor:
    return process_logits(logits, *step(cases, carried))


def assert_each_row(
    knobs: Sequence[dict[str, Any]], expected: Any, *, carried: bool = False, exact: bool = True
) -> None:
    """Row r has knobs[r % len(knobs)]; expected: (case, its logits [1, V]) -> [1, V]."""
    cases = [Case(p, c, knobs[r % len(knobs)]) for r, (p, c) in enumerate(histories(24))]
    logits = random_logits(len(cases))
    got = ours(cases, logits, carried)
    for row, case in enumerate(cases):
        want = expected(case, logits[row : row + 1])[0]
        assert torch.equal(got[row].isinf(), want.isinf()), (row, case)
        if exact:
            assert torch.equal(got[row], want), (row, case)
        torch.testing.assert_close(got[row], want, rtol=1e-6, atol=1e-6)


def sequence_bias(params: dict[str, Any]) -> SequenceBiasLogitsProcessor:
    biases: Any = {(token,): bias for token, bias in params["logit_bias"]}
    return SequenceBiasLogitsProcessor(biases)


def by_transformers(case: Case, logits: torch.Tensor, *processors: Any) -> torch.Tensor:
    return LogitsProcessorList(processors)(torch.tensor([case.tokens]), logits)  # type: ignore[arg-type]


CARRIED = pytest.mark.parametrize("carried", [False, True], ids=["known", "carried"])


@CARRIED
def test_repetition_penalty(carried: bool) -> None:
    knobs = [{"repetition_penalty": value} for value in (1.3, 0.6, 2.0, 1.0001)]

    def expected(case: Case, logits: torch.Tensor) -> torch.Tensor:
        penalty = RepetitionPenaltyLogitsProcessor(case.params["repetition_penalty"])
        return by_transformers(case, logits, penalty)

    assert_each_row(knobs, expected, carried=carried)


def test_logit_bias() -> None:
    knobs: list[dict[str, Any]] = [
        {"logit_bias": ((4, 2.5),)},
        {"logit_bias": ((0, -100.0), (V - 1, 100.0), (7, 0.125))},
        {"logit_bias": ((5, float("-inf")), (6, float("-inf")))},
    ]

    def expected(case: Case, logits: torch.Tensor) -> torch.Tensor:
        return by_transformers(case, logits, sequence_bias(case.params))

    assert_each_row(knobs, expected)


def own_words(case: Case) -> list[list[int]]:
    """Words that the row's history makes due, and some that it does not."""
    t = case.tokens
    words = [[2], [11], [t[-1], 8], [t[-1] + 1, 9], [13, t[-1], 14]]
    words += [[*t[-n:], 20 + n] for n in (2, 3, 5) if n < len(t)]
    # One wrong token in front, and words longer than all that the row has.
    words += [[t[-2] + 1, t[-1], 30]] if len(t) > 1 else []
    words += [[t[0], *t, 31], [*([t[-1]] * 60), 32]]
    # Those that begin with all the row has: see below.
    return [word for word in words if len(word) != len(t) + 1]


@CARRIED
def test_bad_words(carried: bool) -> None:
    cases, expected = [], []
    for prompt, completion in histories(24):
        words = own_words(Case(prompt, completion, {}))
        cases.append(Case(prompt, completion, {"bad_words_ids": tuple(map(tuple, words))}))
        expected.append(NoBadWordsLogitsProcessor(words))
    logits = random_logits(len(cases))
    got = ours(cases, logits, carried)
    for row, case in enumerate(cases):
        want = by_transformers(case, logits[row : row + 1], expected[row])[0]
        assert torch.equal(got[row], want), (row, case)
    forbidden = got.isinf().sum(dim=1).tolist()
    assert min(forbidden) >= 2 and len(set(forbidden)) > 2


@CARRIED
def test_a_word_that_is_due_after_all_the_row_has_is_forbidden(carried: bool) -> None:
    """Its beginning is the whole row: some versions of transformers let it through."""
    cases = [Case([1, 2], [6], {"bad_words_ids": ((1, 2, 6, 9), (2, 2, 6, 10), (8, 1, 2, 6, 11))})]
    got = ours(cases, random_logits(1), carried)
    assert got[0].isinf().nonzero()[:, 0].tolist() == [9]


def test_a_stop_id_is_a_bad_word_as_any_other() -> None:
    """transformers drops it from the list, and the row may end by it after all."""
    got = ours([Case([1, 2], [6], {"bad_words_ids": ((STOPS[0],),)})], random_logits(1))
    assert got[0].isinf().nonzero()[:, 0].tolist() == [STOPS[0]]


def test_single_words_need_no_history() -> None:
    cases = [Case([1, 2], [6], {"bad_words_ids": ((4,), (5,))}), Case([1], [], {})]
    inputs, newest = step(cases)
    assert inputs.history is None
    got = process_logits(random_logits(2), inputs, None)
    assert got[0].isinf().nonzero()[:, 0].tolist() == [4, 5] and not got[1].isinf().any()


def test_single_words_beside_rows_with_a_history() -> None:
    """The words' places among the rows with a history are not those among all rows."""
    cases = [
        Case([1, 2], [6], {"bad_words_ids": ((4,),)}),
        Case([1, 2], [6], {}),
        Case([1, 2], [6], {"bad_words_ids": ((2, 6, 8), (5,))}),
        Case([1, 2], [6], {"repetition_penalty": 1.5}),
        Case([2, 6], [2], {"bad_words_ids": ((6, 2, 7), (2, 6, 8))}),
        Case([2, 6], [2], {"bad_words_ids": ((9,),)}),
    ]
    got = ours(cases, random_logits(6))
    found = [row.isinf().nonzero()[:, 0].tolist() for row in got]
    assert found == [[4], [], [5, 8], [], [7], [9]]


def test_min_tokens() -> None:
    knobs = [{"min_tokens": n, "stop_token_ids": (8,)} for n in (1, 5, 12, 21)]

    def expected(case: Case, logits: torch.Tensor) -> torch.Tensor:
        wait = MinNewTokensLengthLogitsProcessor(
            len(case.prompt), case.params["min_tokens"], [8, *STOPS], device="cpu"
        )
        return by_transformers(case, logits, wait)

    assert_each_row(knobs, expected)
    assert_each_row(knobs, expected, carried=True)


def presence_and_frequency(case: Case, logits: torch.Tensor) -> torch.Tensor:
    """vLLM's documentation: by whether a token is in the text generated so far, and by how often."""
    expected = logits.clone()
    for token, count in Counter(case.completion).items():
        expected[0, token] -= case.params.get("frequency_penalty", 0.0) * count
        expected[0, token] -= case.params.get("presence_penalty", 0.0)
    return expected


@CARRIED
def test_presence_and_frequency_penalties(carried: bool) -> None:
    # Numbers that float32 holds exactly, so that the order of adding does not show.
    knobs = [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.25},
        {"presence_penalty": -1.5, "frequency_penalty": 2.0},
        {"presence_penalty": 0.5, "frequency_penalty": -0.25},
    ]
    assert_each_row(knobs, presence_and_frequency, carried=carried, exact=False)


@CARRIED
def test_all_at_once_in_the_order_of_generate(carried: bool) -> None:
    """Bias, repetition, vLLM's two, bad words, min_tokens: another order gives other values."""
    knobs: list[dict[str, Any]] = [
        {
            "logit_bias": ((6, 3.0), (7, -3.0), (8, 1.5)),
            "repetition_penalty": 1.7,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "bad_words_ids": ((10,), (6, 7), (11, 12)),
            "min_tokens": 9,
        },
        {},
        {"logit_bias": ((6, 3.0),), "frequency_penalty": 0.5},
    ]

    def expected(case: Case, logits: torch.Tensor) -> torch.Tensor:
        p = case.params
        chain: list[Any] = []
        if "logit_bias" in p:
            chain.append(sequence_bias(p))
        if "repetition_penalty" in p:
            chain.append(RepetitionPenaltyLogitsProcessor(p["repetition_penalty"]))
        logits = presence_and_frequency(case, by_transformers(case, logits, *chain))
        if "bad_words_ids" not in p:
            return logits
        wait = MinNewTokensLengthLogitsProcessor(len(case.prompt), p["min_tokens"], list(STOPS), device="cpu")
        words = NoBadWordsLogitsProcessor([list(word) for word in p["bad_words_ids"]])
        return by_transformers(case, logits, words, wait)

    assert_each_row(knobs, expected, carried=carried, exact=False)


KNOBS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.3},
    {"frequency_penalty": 0.3},
    {"logit_bias": ((4, 1.0),)},
    {"bad_words_ids": ((4,), (5, 6))},
    {"min_tokens": 40},
]


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: next(iter(knob)))
def test_rows_without_knobs_keep_their_bits(knob: dict[str, Any]) -> None:
    cases = [Case(p, c, knob if r % 2 else {}) for r, (p, c) in enumerate(histories(20))]
    logits = random_logits(20)
    before = logits.clone()
    got = ours(cases, logits)
    # Not even -0.0 for 0.0, which a comparison of numbers would let pass.
    assert got[::2].numpy().tobytes() == before[::2].numpy().tobytes()
    assert not torch.equal(got[1::2], before[1::2])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: next(iter(knob)))
def test_a_row_does_not_depend_on_its_neighbours(knob: dict[str, Any]) -> None:
    cases = [Case(p, c, {**knob, **KNOBS[r % 5]}) for r, (p, c) in enumerate(histories(20))]
    logits = random_logits(20)
    together = ours(cases, logits)
    for row, case in enumerate(cases):
        alone = ours([case], logits[row : row + 1])
        assert alone.numpy().tobytes() == together[row : row + 1].numpy().tobytes(), row


def test_nothing_is_done_or_gathered_where_nothing_is_asked() -> None:
    cases = [Case(p, c, {"temperature": 1.0, "top_k": 5}) for p, c in histories(8)]
    inputs, newest = step(cases)
    assert inputs.history is None and inputs.bias is None and inputs.bad_words is None
    assert len(inputs.forbidden) == 0
    logits = random_logits(8)
    assert process_logits(logits, inputs, newest) is logits
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert process_logits(logits, *step([Case(p, c, neutral) for p, c in histories(8)])) is logits


def test_only_rows_that_ask_have_a_history() -> None:
    cases = [
        Case(p, c, {"presence_penalty": 1.0} if r in (2, 5) else {}) for r, (p, c) in enumerate(histories(8))
    ]
    inputs, _ = step(cases)
    assert inputs.history is not None and inputs.history.rows.tolist() == [2, 5]
    assert inputs.history.num_tokens.tolist() == [len(cases[r].tokens) - 1 for r in (2, 5)]


def test_ids_that_the_model_has_no_logits_for_are_left_alone() -> None:
    """A tokenizer may know more ids than the model: a stop or a bad word among them comes to nothing."""
    params = {
        "logit_bias": ((4, 1.0), (V + 3, 1.0)),
        "bad_words_ids": ((V,), (6, V + 1), (5,)),
        "stop_token_ids": (V + 7, 8),
        "min_tokens": 9,
    }
    logits = random_logits(1)
    got = ours([Case([1, 2], [6], params)], logits)
    expected = logits.clone()
    expected[0, 4] += 1
    expected[0, [3, 5, 8, 17]] = -torch.inf
    assert torch.equal(got, expected)


# ---------------------------------------------------------------- draws


NUM_DRAWS = 20_000
DRAWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.05},
    "repetition": {"repetition_penalty": 1.6},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "bias and a bad word": {"logit_bias": ((3, 1.5),), "bad_words_ids": ((2, 6, 5),)},
    "all": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "temperature": 1.3,
        "top_k": 9,
        "top_p": 0.9,
    },
}
DRAWN = Case([1, 2, 3, 2], [4, 6, 4, 2, 6], {})


def drawn(params: dict[str, Any], seed: int = 11) -> np.ndarray:
    """How often each of 12 ids comes up, over the draws of as many positions."""
    (one, newest), count = (
        step([Case(DRAWN.prompt, DRAWN.completion, {"temperature": 1.0, **params})]),
        NUM_DRAWS,
    )
    logits = draw_logits().expand(500, -1)
    uniform = uniforms(sequence_key(seed, 0, 0, 0)[None].repeat(count, axis=0), np.arange(count))
    counts = np.zeros(logits.shape[1], np.int64)
    for part in uniform.reshape(-1, 500):
        ids = Sampler(logits.shape[1])(logits, _repeated(one, part), newest.expand(500)).ids
        counts += np.bincount(ids.numpy(), minlength=len(counts))
    return counts


def draw_logits() -> torch.Tensor:
    return torch.randn(1, 12, generator=torch.Generator().manual_seed(4)) * 1.2


def _repeated(one: SamplingInputs, uniform: np.ndarray) -> SamplingInputs:
    """The same row as often as there are draws."""
    count = len(uniform)
    rows = np.arange(count)

    def grown(part: Any, **index: np.ndarray) -> Any:
        if part is None:
            return None
        fields = {
            name: np.repeat(value, count, axis=0) for name, value in vars(part).items() if name not in index
        }
        return type(part)(**fields, **index)

    def of_rows(part: Any) -> np.ndarray:
        return np.tile(rows, 0 if part is None else len(part.rows))

    return SamplingInputs(
        slots=rows,
        temperature=one.temperature.repeat(count),
        top_k=one.top_k.repeat(count),
        top_p=one.top_p.repeat(count),
        min_p=one.min_p.repeat(count),
        draws=FixedDraws(uniform),
        forbidden=np.empty((0, 2), np.int64),
        history=grown(one.history, rows=of_rows(one.history)),
        bias=grown(one.bias, rows=of_rows(one.bias)),
        bad_words=grown(one.bad_words, rows=of_rows(one.bad_words), history_rows=of_rows(one.bad_words)),
    )


def distribution(params: dict[str, Any]) -> np.ndarray:
    """By transformers' processors, in generate's order."""
    case, p = Case(DRAWN.prompt, DRAWN.completion, params), params
    logits = draw_logits()
    chain: list[Any] = []
    if "logit_bias" in p:
        chain.append(sequence_bias(p))
    if "repetition_penalty" in p:
        chain.append(RepetitionPenaltyLogitsProcessor(p["repetition_penalty"]))
    logits = presence_and_frequency(case, by_transformers(case, logits, *chain))
    late: list[Any] = []
    if "bad_words_ids" in p:
        late.append(NoBadWordsLogitsProcessor([list(word) for word in p["bad_words_ids"]]))
    late.append(TemperatureLogitsWarper(p.get("temperature", 1.0)))
    if "top_k" in p:
        late.append(TopKLogitsWarper(p["top_k"]))
    if "top_p" in p:
        late.append(TopPLogitsWarper(p["top_p"]))
    if "min_p" in p:
        late.append(MinPLogitsWarper(p["min_p"]))
    return by_transformers(case, logits, *late).softmax(-1)[0].double().numpy()


def probability_of_counts(counts: np.ndarray, expected: np.ndarray) -> float:
    """How probable so large a chi-squared is if the draws follow the distribution; 0 for an impossible id."""
    possible = expected > 0
    if counts[~possible].sum():
        return 0.0
    wanted = counts.sum() * expected[possible]
    chi = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    half_freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(chi / 2, dtype=torch.float64)))


@pytest.mark.parametrize("name", DRAWS)
def test_draws_follow_the_distribution(name: str) -> None:
    params = DRAWS[name]
    assert probability_of_counts(drawn(params), distribution(params)) > 1e-3
    # The knob does something to this row, and the test would see it missing.
    if name != "plain":
        assert probability_of_counts(drawn({}), distribution(params)) < 1e-6


def test_the_test_of_draws_notices_small_errors() -> None:
    counts = drawn({})
    assert probability_of_counts(counts, distribution({"temperature": 1.05})) < 1e-3
    assert probability_of_counts(np.roll(counts, 1), distribution({})) < 1e-6


# ---------------------------------------------------------------- the whole engine


GENERATE: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7},
    {"bad_words_ids": tuple((token,) for token in range(0, VOCABULARY, 2) if token not in EOS_IDS)},
    {"repetition_penalty": 1.3, "bad_words_ids": ((5,),), "min_tokens": 4},
]


MAX_TOKENS = 24


def engine_prompts() -> list[np.ndarray]:
    return [prompt for prompt in mixed_prompts(20, seed=5) if len(prompt) > 3]


def by_generate(params: dict[str, Any], max_tokens: int) -> list[list[int]]:
    model = random_model(family_config("llama"))
    settings = {
        "repetition_penalty": params.get("repetition_penalty", 1.0),
        "min_new_tokens": params.get("min_tokens", 0),
    }
    if "bad_words_ids" in params:
        settings["bad_words_ids"] = [list(word) for word in params["bad_words_ids"]]
    rows = []
    for ids in engine_prompts():
        prompt = torch.from_numpy(ids.astype(np.int64))[None]
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(EOS_IDS),
            pad_token_id=0,
            **settings,
        )
        rows.append(out[0, len(ids) :].tolist())
    return rows


@pytest.fixture(scope="module", params=range(len(GENERATE)), ids=[str(sorted(p)) for p in GENERATE])
def generated(request: pytest.FixtureRequest) -> tuple[dict[str, Any], list[list[int]]]:
    params = {**GENERATE[request.param]}
    if "min_tokens" in params:
        # Pairs that this model would say: without the ban they are there.
        plain = by_generate({}, MAX_TOKENS)
        pairs = {pair for row in plain for pair in zip(row, row[1:], strict=False)}
        params["bad_words_ids"] = ((5,), *sorted(pairs)[::2])
    return params, by_generate(params, MAX_TOKENS)


@pytest.mark.parametrize("mode", EngineMode)
def test_greedy_equals_generate(generated: tuple[dict[str, Any], list[list[int]]], mode: EngineMode) -> None:
    params, expected = generated
    engine = make_engine(
        loaded_family("llama"),
        mode=mode,
        max_num_seqs=12,
        max_num_batched_tokens=48,
        num_blocks=16,
        reserve=0.0,
    )
    asked = [request(row, ids, max_tokens=MAX_TOKENS, **params) for row, ids in enumerate(engine_prompts())]
    found = by_key(engine.generate(asked))
    for row, ids in enumerate(expected):
        assert found[RowKey(0, row), 0].token_ids.tolist() == ids, row
    assert engine.stats.counters.num_preemptions > 0
    assert engine.stats.counters.num_partial_prefill_chunks > 0
    # The knobs change what this model says.
    assert (
        sum(a != b for a, b in zip(expected, by_generate({}, MAX_TOKENS), strict=True)) > len(expected) // 2
    )


def penalised_rows() -> list[Request]:
    return [
        request(
            row,
            prompt,
            temperature=1.0,
            max_tokens=18,
            logprobs=True,
            repetition_penalty=(1.0, 1.3, 0.8)[row % 3],
            presence_penalty=(0.0, 0.4)[row % 2],
            frequency_penalty=(0.3, 0.0, 0.0, 0.2)[row % 4],
            bad_words_ids=((row,), (row, 3)) if row % 5 == 0 else (),
            logit_bias=((11, 2.0),) if row % 5 == 1 else (),
            min_tokens=row % 3,
        )
        for row, prompt in enumerate(mixed_prompts(20, seed=6))
    ]


@pytest.mark.parametrize("mode", EngineMode)
@pytest.mark.parametrize("settings", [
    {"max_num_seqs": 1},
    {"max_num_seqs": 5, "max_num_batched_tokens": 33},
    {"max_num_seqs": 64},
    {"max_num_seqs": 16, "max_num_batched_tokens": 48, "num_blocks": 15, "reserve": 0.0},
], ids=["alone", "five", "all", "preempted"])  # fmt: skip
def test_draws_with_penalties_do_not_depend_on_company(mode: EngineMode, settings: dict[str, Any]) -> None:
    loaded = loaded_family("llama")
    expected = by_key(make_engine(loaded, seed=3, num_topk=1).generate(penalised_rows()))
    engine = make_engine(loaded, seed=3, num_topk=1, mode=mode, **settings)
    found = by_key(engine.generate(penalised_rows()))
    assert found.keys() == expected.keys() and len({c.token_ids.tobytes() for c in expected.values()}) > 15
    for key, want in expected.items():
        assert found[key].token_ids.tobytes() == want.token_ids.tobytes(), key
        assert want.logprobs is not None and found[key].logprobs.tobytes() == want.logprobs.tobytes()  # type: ignore[union-attr]
    assert (engine.stats.counters.num_preemptions > 0) is ("num_blocks" in settings)
