"""Ids and log-probabilities are those of the engine's sampler, whichever way a row takes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FixedDraws
from kernels.paged_cases import DEVICE, needs_gpu

pytest.importorskip("triton", reason="the kernels need triton")

from pipeline.engine.sampler import Sampled, Sampler, filter_logits  # noqa: E402
from pipeline.engine.sampling_inputs import SamplingInputs  # noqa: E402
from pipeline.kernels.sample_launch import DEFAULT_LAUNCH, SampleLaunch  # noqa: E402
from pipeline.kernels.sample_rows import SampledRows, sample_rows  # noqa: E402

# Several chunks even of few ids, and lists too short for most rows: those search the whole row.
SMALL = SampleLaunch(chunk=64, groups=16, listed=8, segment=8, tile=16, block=128, ways=16)
# Several chunks, and lists that are long enough.
CHUNKED = replace(SMALL, chunk=128, listed=64, segment=64, tile=128)
LAUNCHES = pytest.mark.parametrize(
    "launch", [DEFAULT_LAUNCH, CHUNKED, SMALL], ids=["one", "chunked", "small"]
)
LAST_UNIFORM = 1 - 2**-53
# Two ways to add up weights of float32 differ by no more of the total.
ROUNDING = 1e-6


def parameters(count: int, **rows: Any) -> dict[str, torch.Tensor]:
    """Every parameter one value for all rows, or a list with one a row."""
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "uniform": 0.5}
    dtypes = {"top_k": torch.int32, "uniform": torch.float64}
    return {
        name: torch.as_tensor(rows.get(name, value), dtype=dtypes.get(name, torch.float32)).expand(count)
        for name, value in neutral.items()
    }


def by_kernels(
    logits: torch.Tensor, vocab_size: int, rows: dict[str, torch.Tensor], **options: Any
) -> SampledRows:
    on_device: dict[str, Any] = {name: values.contiguous().to(DEVICE) for name, values in rows.items()}
    got = sample_rows(logits.to(DEVICE), vocab_size, **on_device, **options)
    return SampledRows(*(None if part is None else part.cpu() for part in got))


def by_sampler(
    logits: torch.Tensor, vocab_size: int, rows: dict[str, torch.Tensor], num_topk: int = 0
) -> Sampled:
    arrays: dict[str, Any] = {
        name: values.contiguous().numpy() for name, values in rows.items() if name != "uniform"
    }
    inputs = SamplingInputs(
        slots=np.arange(len(logits)),
        draws=FixedDraws(rows["uniform"].contiguous().numpy()),
        forbidden=np.empty((0, 2), np.int64),
        **arrays,
    )
    last_ids = torch.zeros(len(logits), dtype=torch.long)
    return Sampler(vocab_size, logprobs=True, num_topk=num_topk)(logits, inputs, last_ids)


def assert_rounding_decides(
    logits: torch.Tensor, vocab_size: int, rows: dict[str, torch.Tensor], ids: torch.Tensor
) -> None:
    """The draw lies at the very border of the id's share, by float64."""
    x = logits[:, :vocab_size].float()
    x = (x - x.amax(-1, keepdim=True)) / rows["temperature"][:, None]
    kept = filter_logits(x, rows["top_k"], rows["top_p"], rows["min_p"])
    shares = torch.softmax(kept.double(), -1).cumsum(-1)
    high = shares.gather(1, ids[:, None])[:, 0]
    low = torch.where(ids > 0, shares.gather(1, (ids - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    assert bool(((low - ROUNDING <= rows["uniform"]) & (rows["uniform"] <= high + ROUNDING)).all())


def random_logits(rows: int, vocab: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def random_parameters(count: int, vocab: int, seed: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return parameters(
        count,
        temperature=rng.choice([0, 1e-6, 0.3, 1, 1, 1, 5], count),
        top_k=rng.choice([0, 0, 1, 2, 7, 40, vocab, 10 * vocab], count),
        top_p=rng.choice([1, 1, 1e-6, 0.3, 0.9, 0.999], count),
        min_p=rng.choice([0, 0, 0.01, 0.5], count),
        uniform=np.where(rng.random(count) < 0.2, rng.choice([0, LAST_UNIFORM], count), rng.random(count)),
    )


def awkward_logits(vocab: int) -> torch.Tensor:
    """Equal ids by the score, a few that may be drawn, a single one, none but one value, extremes."""
    logits = random_logits(8, vocab, seed=5)
    logits[0] = logits[0].round()
    logits[1] = logits[1].to(torch.bfloat16).float()
    logits[2, torch.arange(vocab) % 3 > 0] = -torch.inf
    logits[3] = -torch.inf
    logits[3, vocab // 2] = 2.0
    logits[4] = 1.5
    logits[5] *= 1e30
    logits[6] = torch.arange(vocab) * 0.01
    logits[7] = 1e-3 * logits[7] + 1e4
    return logits


@pytest.mark.parametrize(
    ("launch", "vocab", "count"),
    [(DEFAULT_LAUNCH, 300, 18), (CHUNKED, 257, 8), (SMALL, 300, 8)],
    ids=["one", "chunked", "small"],
)
def test_random_rows_equal_the_sampler(launch: SampleLaunch, vocab: int, count: int) -> None:
    logits = torch.cat([awkward_logits(vocab), random_logits(count, vocab, seed=1)])[:count]
    rows = random_parameters(len(logits), vocab, seed=vocab)
    got = by_kernels(logits, vocab - 7, rows, launch=launch, num_topk=5)
    want = by_sampler(logits, vocab - 7, rows, num_topk=5)
    different = got.ids != want.ids
    assert int(different.sum()) <= 1
    assert_rounding_decides(
        logits[different], vocab - 7, {n: v[different] for n, v in rows.items()}, got.ids[different]
    )
    same = ~different
    torch.testing.assert_close(got.logprobs[same], want.logprobs[same], rtol=3e-7, atol=5e-7)
    torch.testing.assert_close(got.topk_logprobs, want.topk_logprobs, rtol=3e-7, atol=5e-7)
    assert torch.equal(got.topk_ids, want.topk_ids)


@LAUNCHES
def test_sets_of_equal_weights_are_exact(launch: SampleLaunch) -> None:
    """Weights are 0 or 1, so nothing is rounded; one row for each id that may be drawn shows the set."""
    vocab, members = 150, 8
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))[:members].sort().values
    logits = torch.full((members, vocab), -torch.inf)
    logits[:, ids] = 7.0
    uniform = (torch.arange(members) + 0.5) / members
    for top_k, top_p in ((0, 0.5), (3, 0.25)):
        rows = parameters(members, top_k=top_k, top_p=top_p, uniform=uniform.double())
        got = by_kernels(logits, vocab, rows, launch=launch).ids
        # top-k keeps all that equal its last; top-p the lowest of equals.
        assert got.unique().tolist() == ids[: int(members * top_p)].tolist(), (top_k, top_p)


@pytest.mark.parametrize("launch", [DEFAULT_LAUNCH, replace(SMALL, listed=1, segment=1, tile=2)], ids=str)
def test_orders_and_ties_of_four_ids(launch: SampleLaunch) -> None:
    """Orders and ties of four ids; top_p never at a border that rounding could move."""
    logits = torch.tensor(list(itertools.product([0.0, 0.69, -torch.inf], repeat=4)))
    logits = logits[(logits > -torch.inf).any(-1)][::4]
    index = torch.arange(len(logits))
    rows = parameters(
        len(logits),
        top_k=torch.tensor([0, 1, 2, 3])[index % 4],
        top_p=torch.tensor([1.0, 0.45, 0.74])[index // 4 % 3],
        min_p=torch.tensor([0.0, 0.9, 0.2])[index // 2 % 3],
        uniform=torch.tensor([0.0, 0.9, LAST_UNIFORM, 0.37])[index // 3 % 4],
    )
    assert torch.equal(by_kernels(logits, 4, rows, launch=launch).ids, by_sampler(logits, 4, rows).ids)


@LAUNCHES
def test_greedy_takes_the_lowest_of_equals_and_no_padding(launch: SampleLaunch) -> None:
    logits = torch.zeros(3, 200)
    logits[0, [70, 71, 190]] = 5.0
    logits[1, 180:] = 9.0
    logits[2, [179, 199]] = torch.tensor([1.0, 2.0])
    got = by_kernels(logits, 180, parameters(3, temperature=0.0), launch=launch)
    assert got.ids.tolist() == [70, 0, 179] and got.ids.dtype == torch.int64
    assert got.logprobs is None and got.topk_ids is None


@LAUNCHES
@pytest.mark.parametrize("num_topk", [20, 200])
def test_alternatives_are_in_order_with_equals_by_id(launch: SampleLaunch, num_topk: int) -> None:
    if num_topk > launch.listed:
        launch = replace(launch, listed=256)
    logits = awkward_logits(200)[[0, 2, 3, 4]]
    rows = parameters(len(logits), temperature=0.0)
    got = by_kernels(logits, 200, rows, launch=launch, num_topk=num_topk)
    want = by_sampler(logits, 200, rows, num_topk=num_topk)
    assert torch.equal(got.topk_ids, want.topk_ids)
    torch.testing.assert_close(got.topk_logprobs, want.topk_logprobs, rtol=3e-7, atol=5e-7)
    assert torch.equal(got.logprobs, got.topk_logprobs[:, 0]) and torch.equal(got.ids, got.topk_ids[:, 0])


@pytest.mark.parametrize("launch", [DEFAULT_LAUNCH, SMALL], ids=["one", "small"])
def test_a_row_does_not_depend_on_its_neighbours_nor_on_its_place(launch: SampleLaunch) -> None:
    wide = random_logits(6, 460, seed=7)
    logits, vocab = wide[:, 100:330], 230
    rows = random_parameters(6, vocab, seed=8)
    together = by_kernels(logits, vocab, rows, launch=launch, num_topk=3)
    for row in (1, 5):
        alone = {name: values[row : row + 1] for name, values in rows.items()}
        for part, whole in zip(
            by_kernels(logits[row : row + 1].clone(), vocab, alone, launch=launch, num_topk=3),
            together,
            strict=True,
        ):
            assert torch.equal(part[0], whole[row])


def test_half_types_are_read_as_they_are() -> None:
    logits = random_logits(6, 300, seed=4).to(torch.bfloat16)
    rows = parameters(6, top_p=[0.9] * 3 + [1.0] * 3, uniform=[0.1, 0.5, 0.9] * 2)
    rows["top_k"] = rows["top_k"].long()
    got = by_kernels(logits, 300, rows, num_topk=4)
    want = by_kernels(logits.float(), 300, rows, num_topk=4)
    assert all(torch.equal(part, whole) for part, whole in zip(got, want, strict=True))
    assert torch.equal(got.ids, by_sampler(logits, 300, rows).ids)


def test_draws_follow_the_distribution() -> None:
    """Uniforms spread evenly give each id its share of the rows, to one row."""
    count, probabilities = 40, torch.tensor([0.1, 0.2, 0.0, 0.3, 0.4])
    rows = parameters(count, uniform=(torch.arange(count).double() + 0.5) / count)
    ids = by_kernels(probabilities.log().expand(count, -1), 5, rows).ids
    assert (ids.bincount(minlength=5) - count * probabilities).abs().max() <= 1
    assert torch.equal(ids, ids.sort().values)


def test_logits_that_are_no_numbers_give_ids_of_the_vocabulary() -> None:
    logits = torch.full((4, 150), torch.nan)
    logits[1] = -torch.inf
    rows = parameters(4, temperature=[0, 1, 1, 1], top_p=[1, 0.9, 0.9, 1], top_k=[0, 0, 5, 0])
    got = by_kernels(logits, 140, rows, launch=SMALL, num_topk=3)
    assert bool(((got.ids >= 0) & (got.ids < 140)).all())


def test_no_rows() -> None:
    got = by_kernels(torch.empty(0, 50), 50, parameters(0), num_topk=2)
    assert got.ids.shape == (0,) and got.topk_logprobs.shape == (0, 2)


@pytest.mark.gpu
@needs_gpu
def test_a_graph_replays_what_runs_without_one() -> None:
    logits = random_logits(8, 40_000, seed=6).to(DEVICE)
    rows = random_parameters(8, 40_000, seed=6)
    on_device: dict[str, Any] = {name: values.contiguous().to(DEVICE) for name, values in rows.items()}
    eager = sample_rows(logits, 39_990, **on_device, num_topk=20)
    static = torch.zeros_like(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample_rows(static, 39_990, **on_device, num_topk=20)
    static.copy_(logits)
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(captured, eager, strict=True))
