from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from workers.engines.base import SamplingParams
from workers.engines.random import gumbel, seed_tensor, uniform
from workers.engines.sampling import NUCLEUS_CANDIDATES, restrict, sample_tokens

CPU = torch.device("cpu")
NO_STOPS = torch.empty(0, dtype=torch.int64)


def frequencies(logits: torch.Tensor, sampling: SamplingParams, draws: int = 10_000) -> torch.Tensor:
    tokens, _ = sample_tokens(logits.expand(draws, -1).clone(), seed_tensor(range(draws), CPU), 0, sampling, NO_STOPS)
    return torch.bincount(tokens, minlength=logits.shape[-1]) / draws


@pytest.mark.parametrize("vocabulary", [5, 256, 700])
def test_draws_follow_the_distribution_within_and_across_blocks(vocabulary: int) -> None:
    # Mass in the first, in a middle and in the partly filled last block.
    logits = torch.full((vocabulary,), -20.0)
    places = sorted({0, 1, vocabulary // 2, vocabulary - 1})
    logits[places] = torch.linspace(0, 1.5, len(places))
    expected = torch.softmax(logits / 0.7, dim=0)
    assert (frequencies(logits, SamplingParams(temperature=0.7)) - expected).abs().max() < 0.02


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    seen = frequencies(logits, SamplingParams(top_p=0.7), draws=5000)
    assert seen[2:].sum() == 0
    assert seen[0] == pytest.approx(0.625, abs=0.03)


def test_top_p_is_taken_of_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.2, 0.2, 0.1, 0.1]).log()
    # Of the first token alone after renormalising: 0.4 / 0.6 >= 0.6.
    assert frequencies(logits + torch.tensor([0, 0.01, 0, 0, 0]), SamplingParams(top_k=2, top_p=0.6), 500)[0] == 1


def test_a_flat_distribution_sorts_the_whole_vocabulary_for_top_p() -> None:
    vocabulary = 4 * NUCLEUS_CANDIDATES
    logits = torch.linspace(0, 1e-3, vocabulary)[None]
    kept = restrict(logits, logits.logsumexp(-1, keepdim=True), SamplingParams(top_p=0.9)).isfinite().sum()
    assert int(kept) == pytest.approx(0.9 * vocabulary, rel=0.01)


def test_log_probs_are_of_the_whole_temperature_scaled_distribution() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    sampling = SamplingParams(temperature=0.5, top_k=2, top_p=0.5, min_new_tokens=1)
    stops = torch.tensor([int(logits[0].argmax())])
    tokens, log_probs = sample_tokens(logits.clone(), seed_tensor(range(6), CPU), 0, sampling, stops)
    expected = torch.log_softmax(logits / 0.5, dim=-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected)
    assert int(tokens[0]) != int(stops)


def test_what_a_block_keeps_without_its_forbidden_ids_is_drawn_as_often_as_before() -> None:
    probabilities = torch.full((600,), 1e-4)
    probabilities[[3, 5, 300]] = torch.tensor([0.5, 0.2, 0.2])
    sampling = SamplingParams(min_new_tokens=1, max_new_tokens=2)
    logits = probabilities.log().expand(2000, -1).clone()
    tokens, _ = sample_tokens(logits, seed_tensor(range(2000), CPU), 0, sampling, torch.tensor([3, 4]))
    assert not torch.isin(tokens, torch.tensor([3, 4])).any()
    left = 0.2 / (probabilities.sum() - probabilities[3] - probabilities[4])
    for token in (5, 300):
        assert float((tokens == token).float().mean()) == pytest.approx(float(left), abs=0.04)


def test_a_number_depends_on_its_counter_only() -> None:
    seeds = seed_tensor([3, 2**64 - 1, -5], CPU)
    together = uniform(seeds, 4, 64)
    for row in range(3):
        torch.testing.assert_close(uniform(seeds[row : row + 1], 4, 64)[0], together[row], rtol=0, atol=0)
    torch.testing.assert_close(uniform(seeds, 4, 16), together[:, :16], rtol=0, atol=0)


def test_numbers_are_the_same_in_every_version() -> None:
    """Stored seeds must reproduce their samples: this is the splitmix64 arithmetic in Python's integers."""
    mask = 2**64 - 1

    def mixed(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    seed, step = 2**63 + 12345, 9
    key = (mixed(mixed(seed) + (step + 1) * 0xD1B54A32D192ED03 & mask)) & mask
    expected = [((mixed(key + (i + 1) * 0x9E3779B97F4A7C15 & mask) >> 11) + 0.5) * 2.0**-53 for i in range(50)]
    assert uniform(seed_tensor([seed], CPU), step, 50)[0].tolist() == expected


def test_numbers_are_uniform_and_uncorrelated() -> None:
    numbers = np.concatenate([uniform(seed_tensor(range(200), CPU), step, 100).numpy() for step in range(10)])
    assert abs(numbers.mean() - 0.5) < 0.003 and abs(numbers.var() - 1 / 12) < 0.002
    # Neighbouring indices, seeds and steps.
    for one, other in ((numbers[:, :-1], numbers[:, 1:]), (numbers[:-1], numbers[1:]), (numbers[:-200], numbers[200:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.01
    noise = gumbel(seed_tensor(range(1000), CPU), 0, 100)
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"max_new_tokens": 0}, {"min_new_tokens": 500}]
)
def test_values_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]
