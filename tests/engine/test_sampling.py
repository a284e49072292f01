"""Sampling against the library's own chains: on made-up rows, which need no model, and on real ones."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localfast.core import Sampling
from localfast.engine.llama import Context, FloatRow, Model, NativeLog, bindings
from localfast.engine.messages import EngineConfig
from localfast.engine.sampling import (
    MAX_TOP_K,
    Bias,
    NativeChain,
    Penalty,
    Sampler,
    TopK,
    WholeRow,
    draw,
    largest,
    log_probability,
)
from localfast.engine.sequence import Chunk, Sequence

LARGE = 150_001  # no multiple of anything
SAMPLINGS = {
    "defaults": Sampling(),
    "top_k": Sampling(top_k=7, top_p=1, min_p=0),
    "top_k of one": Sampling(top_k=1),
    "top_k and top_p": Sampling(top_k=200, top_p=0.7123, min_p=0, temperature=1.3),
    "top_k and min_p": Sampling(top_k=100, top_p=1, min_p=0.113),
    "top_k beyond the vocabulary": Sampling(top_k=MAX_TOP_K, top_p=0.9871, min_p=0),
    "min_p": Sampling(top_k=0, top_p=1, min_p=0.0213),
    "top_p": Sampling(top_k=0, top_p=0.9137, min_p=0),
    "top_p that nearly all pass": Sampling(top_k=0, top_p=0.9991, min_p=0, temperature=0.5),
    "top_p of nothing": Sampling(top_k=0, top_p=0, min_p=0),
    "top_p and min_p": Sampling(top_k=0, top_p=0.9137, min_p=0.0313),
    "neither": Sampling(top_k=0, top_p=1, min_p=0, temperature=2),
}


def random_row(size: int, seed: int, *, step: float = 0.0) -> FloatRow:
    row = np.random.default_rng(seed).standard_normal(size) * 3
    return np.ascontiguousarray(np.round(row / step) * step if step else row, np.float32)


def native_apply(sampler: object, logits: FloatRow) -> np.ndarray[Any, Any]:
    """Id, logit and p of what a native sampler leaves of the row, largest logit (before) first."""
    rows = np.zeros(logits.size, [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    rows["id"], rows["logit"] = np.arange(logits.size), logits
    pointer = ctypes.cast(rows.ctypes.data, ctypes.POINTER(bindings.llama_token_data))
    array = bindings.llama_token_data_array(data=pointer, size=logits.size, selected=-1, sorted=False)
    bindings.llama_sampler_apply(sampler, ctypes.byref(array))
    left = rows[: array.size]
    return left[(-logits[left["id"]]).argsort(kind="stable")]


def assert_native_candidates(sampling: Sampling, logits: FloatRow) -> None:
    ours = TopK(sampling, 0) if sampling.top_k > 0 else WholeRow(sampling, 0)
    tokens, weights = ours.candidates(logits)
    ids = np.arange(logits.size) if tokens is None else np.array(tokens)
    order = (-logits[ids]).argsort(kind="stable")
    ids, shares = ids[order], (np.array(weights, np.float64) / np.sum(weights, dtype=np.float64))[order]
    chain = NativeChain(sampling, 0)
    native = native_apply(chain.handle, logits)
    chain.close()
    both = min(ids.size, native.size)
    if sampling.top_k == 0 and 0 < sampling.top_p < 1:  # the library adds up the whole row in 32 bits, one after another
        assert shares[both:].sum() < 2e-3
        assert native["p"][both:].sum() < 2e-3
    else:
        assert ids.size == native.size
    assert np.array_equal(logits[ids[:both]], logits[native["id"][:both]])
    assert np.allclose(shares[:both], native["p"][:both], rtol=2e-3, atol=1e-6)
    edge = logits[ids[both - 1]]  # which of the tokens that are equal at the edge come in is nobody's promise
    assert set(ids[logits[ids] > edge]) == set(native["id"][logits[native["id"]] > edge])
    assert np.unique(ids).size == ids.size


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("size", [40, 3000, LARGE])
def test_sampling_leaves_the_candidates_that_llama_cpp_leaves(name: str, size: int) -> None:
    assert_native_candidates(SAMPLINGS[name], random_row(size, seed=size))


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampling_leaves_the_same_candidates_where_logits_are_equal(name: str) -> None:
    assert_native_candidates(SAMPLINGS[name], random_row(40_000, seed=7, step=0.25))


@pytest.mark.parametrize("top_p", [0.3, 0.9137, 0.9991])
def test_sampling_keeps_the_fewest_tokens_that_have_top_p_of_the_whole(top_p: float) -> None:
    row = random_row(LARGE, seed=5)
    tokens, _ = WholeRow(Sampling(top_k=0, top_p=top_p, min_p=0), 0).candidates(row)
    assert tokens is not None
    exact = np.exp(row.astype(np.float64))
    kept = exact[tokens].sum() / exact.sum()
    last = exact[tokens[-1]] / exact.sum()
    assert np.array_equal(row[tokens], np.sort(row)[::-1][: tokens.size])
    assert kept - last - 1e-6 <= top_p <= kept + 1e-6


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=300), st.integers(1, 300))
def test_sampling_finds_the_largest_in_order_and_equal_ones_by_id(values: list[int], count: int) -> None:
    tokens, logits = largest(np.array(values, np.float32), count)
    assert tokens == sorted(range(len(values)), key=lambda token: (-values[token], token))[:count]
    assert logits == [values[token] for token in tokens]


@pytest.mark.parametrize("size", [1024, 49_152, LARGE])
@pytest.mark.parametrize("count", [1, 5, 40, 256, 1000])
def test_sampling_finds_the_largest_of_a_long_row(size: int, count: int) -> None:
    row = random_row(size, seed=count, step=0.5)
    row[-3:] = 99, 98, 100  # behind the last full row of the grid
    row[:5] = -np.inf
    assert largest(row, count)[0] == sorted(range(size), key=lambda token: (-row[token], token))[:count]


@pytest.mark.parametrize("value", [-np.inf, 1.5])
def test_sampling_finds_the_largest_where_nearly_all_are_equal(value: float) -> None:
    row = np.full(LARGE, value, np.float32)
    row[[70_000, 900, LARGE - 1]] = 2, 3, 4
    assert largest(row, 6) == ([LARGE - 1, 900, 70_000, 0, 1, 2], [4, 3, 2, value, value, value])


def test_sampling_draws_by_weight() -> None:
    weights = np.array([0.5, 0, 0.125, 0.25, 0, 0.125], np.float32)
    chance = random.Random(3).random
    counts = np.bincount([draw(weights, chance()) for _ in range(20_000)], minlength=6) / 20_000
    assert np.abs(counts - weights).max() < 0.01


@given(st.floats(0, 1, exclude_max=True), st.sampled_from([3, 511, 512, 4096, 4097, 10_000]), st.integers(0, 3))
def test_sampling_draws_the_token_at_a_chance_and_never_one_without_weight(chance: float, size: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    weights = (generator.random(size) * (generator.random(size) < 0.1)).astype(np.float32)
    weights[size // 2] = 0.5
    place = draw(weights, chance)
    assert weights[place] > 0
    running = weights.cumsum(dtype=np.float64) / weights.sum(dtype=np.float64)
    before = running[place - 1] if place else 0
    assert before - 1e-6 <= 1 - chance <= running[place] + 1e-6


def sampler(sampling: Sampling, vocabulary: int = LARGE, prompt: tuple[int, ...] = (), **options: Any) -> Sampler:
    model: Any = SimpleNamespace(vocabulary=vocabulary, ends=frozenset({5, 6}))
    return Sampler(model, sampling, prompt, options.pop("seed", 1), **options)


def context(*rows: FloatRow) -> Any:
    return SimpleNamespace(logits=lambda row: rows[row])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=0), Sampling(top_k=0, top_p=1, min_p=0)])
def test_sampling_gives_the_same_tokens_for_the_same_seed(sampling: Sampling) -> None:
    rows = context(*(random_row(LARGE, seed) for seed in range(12)))
    runs = []
    for seed in (1, 1, 2):
        chosen = sampler(sampling, seed=seed)
        runs.append([chosen.sample(rows, row) for row in range(12)])
    assert runs[0] == runs[1] != runs[2]


def test_sampling_without_temperature_takes_the_first_of_the_best() -> None:
    row = random_row(1000, seed=1, step=0.5)
    row[[300, 400]] = 50
    assert sampler(Sampling(temperature=0), 1000).sample(context(row), 0) == 300


def test_sampling_never_ends_where_the_end_is_ignored() -> None:
    row = random_row(1000, seed=1)
    row[[5, 6]] = 100
    before = row.copy()
    assert sampler(Sampling(temperature=0), 1000).sample(context(row), 0) == 5
    rest = np.delete(row, [5, 6])
    assert row[sampler(Sampling(temperature=0), 1000, ignore_eos=True).sample(context(row), 0)] == rest.max()
    assert np.array_equal(row, before)


def test_sampling_adds_a_bias_and_ignores_tokens_that_do_not_exist() -> None:
    row = random_row(1000, seed=1)
    bias = ((17, 60.0), (17, 60.0), (18, 100.0), (1000, 200.0), (-1, 200.0))
    assert sampler(Sampling(temperature=0, logit_bias=bias), 1000).sample(context(row), 0) == 17


def test_sampling_leaves_the_row_as_it_was() -> None:
    row = random_row(LARGE, seed=2)
    before = row.copy()
    everything = Sampling(repeat_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, logit_bias=((3, 4.0), (9, -4.0)))
    chosen = sampler(everything, prompt=(3, 3, 9, 11))
    for _ in range(5):
        chosen.sample(context(row), 0)
        assert np.array_equal(row, before)


@given(
    history=st.lists(st.integers(0, 150), max_size=300),
    window=st.integers(1, 100),
    repeat=st.floats(0.5, 2, width=32),
    pair=st.tuples(st.floats(-2, 2, width=32), st.floats(-2, 2, width=32)),
)
def test_sampling_penalizes_as_llama_cpp_does(history: list[int], window: int, repeat: float, pair: tuple[float, float]) -> None:
    row = random_row(200, seed=4)
    before = row.copy()
    native = bindings.llama_sampler_init_penalties(200, window, repeat, *pair)
    penalty = Penalty(window, repeat, *pair)
    for token in history:
        bindings.llama_sampler_accept(native, token)
        penalty.add(token)
    left = native_apply(native, row)
    expected = left["logit"][left["id"].argsort()]
    bindings.llama_sampler_free(native)
    tokens, values = penalty.apply(row)
    assert np.allclose(row, expected, rtol=1e-5, atol=1e-5)
    row[tokens] = values
    assert np.array_equal(row, before)


def test_sampling_repeats_no_token_of_the_prompt_but_counts_only_the_answer_for_the_other_penalties() -> None:
    row = np.zeros(1000, np.float32)
    row[[7, 8, 9]] = 10, 9, 8.5
    assert sampler(Sampling(temperature=0, repeat_penalty=2.0), 1000, (7,)).sample(context(row), 0) == 8
    assert sampler(Sampling(temperature=0, repeat_penalty=2.0, repeat_last_n=1), 1000, (7, 1)).sample(context(row), 0) == 7
    assert sampler(Sampling(temperature=0, repeat_penalty=2.0, repeat_last_n=-1), 1000, (7, 1)).sample(context(row), 0) == 8
    present = sampler(Sampling(temperature=0, presence_penalty=1.2), 1000, (7,))
    assert [present.sample(context(row), 0) for _ in range(4)] == [7, 8, 7, 7]


def test_sampling_adds_a_bias_before_it_penalizes() -> None:
    row = np.zeros(8, np.float32)
    bias, penalty = Bias({3: 4.0}), Penalty(9, 2.0, 0.0, 0.0)
    penalty.add(3)
    bias.apply(row)
    penalty.apply(row)
    assert row.tolist() == [0, 0, 0, 2, 0, 0, 0, 0]
    chosen = sampler(Sampling(temperature=0, repeat_penalty=2.0, logit_bias=((3, 4.0),)), 8, (3,))
    assert chosen.sample(context(np.array([0, 0, 0, 0, 3, 0, 0, 0], np.float32)), 0) == 4


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), *SAMPLINGS.values()])
@pytest.mark.parametrize("broken", [slice(None), slice(100, 101)])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_sampling_survives_logits_that_are_not_numbers(sampling: Sampling, broken: slice) -> None:
    row = random_row(LARGE, seed=1)
    row[broken] = np.nan
    assert 0 <= sampler(sampling).sample(context(row), 0) < LARGE


def test_sampling_draws_as_often_as_the_weights_say() -> None:
    row = random_row(LARGE, seed=1) - 40
    row[[10, 20, 30]] = np.log([0.5, 0.3, 0.2])
    for sampling in (Sampling(temperature=1, top_p=1), Sampling(temperature=1, top_k=0, top_p=0.999, min_p=0)):
        chosen = sampler(sampling)
        tokens = [chosen.sample(context(row), 0) for _ in range(1000)]
        assert [tokens.count(token) / 1000 for token in (10, 20, 30)] == pytest.approx([0.5, 0.3, 0.2], abs=0.05)


def test_sampling_reports_log_probabilities_of_the_row() -> None:
    row = random_row(5000, seed=9, step=0.25)
    exact = row - np.logaddexp.reduce(row.astype(np.float64))
    model: Any = SimpleNamespace(piece=lambda token: str(token).encode())
    logprob = log_probability(model, row, 123, 5)
    best = sorted(range(5000), key=lambda token: (-row[token], token))[:5]
    assert (logprob.text, logprob.logprob) == ("123", pytest.approx(exact[123], abs=1e-4))
    assert [text for text, _, _ in logprob.top] == [str(token) for token in best]
    assert [value for _, _, value in logprob.top] == pytest.approx([exact[token] for token in best], abs=1e-4)
    assert log_probability(model, row, 123, 0).top == ()


@pytest.fixture(scope="module")
def real(starter_path: Path) -> Iterator[tuple[Model, Context, int]]:
    """A model, a context that has just computed a prompt, and how many rows of logits it has."""
    config = EngineConfig(
        model="starter",
        path=str(starter_path),
        gpu_layers=0,
        context_tokens=64,
        cells=64,
        slots=1,
        batch_tokens=64,
        ubatch_tokens=64,
        threads=2,
        kv_type="f16",
    )
    model = Model(config, NativeLog())
    context = Context(model, config, max_outputs=64)
    tokens = model.tokenize("def add(a, b):\n    return a + b\n\nThe capital of France is")
    sequence = Sequence(request_id=1, index=0, tokens=tokens, prompt_tokens=len(tokens), limit=64)
    assert context.decode([Chunk(sequence, 0, 0, len(tokens), len(tokens))])
    yield model, context, len(tokens)
    context.close()
    model.close()


@pytest.mark.model
@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampling_leaves_the_candidates_that_llama_cpp_leaves_of_real_rows(name: str, real: tuple[Model, Context, int]) -> None:
    _, context, rows = real
    for row in range(rows):
        assert_native_candidates(SAMPLINGS[name], context.logits(row))


@pytest.mark.model
@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 0}])
def test_sampling_heeds_bias_and_penalties_on_every_way(options: dict[str, Any], real: tuple[Model, Context, int]) -> None:
    model, context, rows = real
    before = context.logits(rows - 1).copy()
    bias = ((77, 100 - float(before[77])), (78, 99 - float(before[78])))
    forced = Sampler(model, Sampling(logit_bias=bias, presence_penalty=2, min_p=0.9, **options), (), 1)
    assert [forced.sample(context, rows - 1) for _ in range(3)] == [77, 78, 77]
    forced.close()
    assert np.array_equal(context.logits(rows - 1), before)


@pytest.mark.model
def test_sampling_by_the_native_chain_obeys_the_seed(real: tuple[Model, Context, int]) -> None:
    model, context, rows = real
    runs = []
    for seed in (0xFFFFFFFF, 0xFFFFFFFF, 5):
        chosen = Sampler(model, Sampling(temperature=5, top_k=1000), (), seed)
        runs.append([chosen.sample(context, row) for row in range(rows)])
        chosen.close()
    assert runs[0] == runs[1] != runs[2]
