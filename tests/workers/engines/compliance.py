"""What every rollout engine must do, as plain functions over a factory of engines.

An engine's test module parametrises over `CHECKS` and calls each with a factory. The factory makes a new engine
with the weights of `reference(family)` and the given `max_batch_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.models import tiny_config
from workers.engines.base import (
    EngineError,
    GenerateRequest,
    GenerateResult,
    RolloutEngine,
    Sample,
    SamplingParams,
    weights_checksum,
)

EOS = 1
STOPS = tuple(range(4, 30))
"""Enough of the vocabulary for random models to stop at various lengths."""


class EngineFactory(Protocol):
    family: str

    def __call__(self, *, max_batch_tokens: int = 65536) -> RolloutEngine: ...

    def write(self, engine: RolloutEngine, model: PreTrainedModel) -> None:
        """The model's weights into the engine's tensors, as a transition does."""
        ...


@cache
def reference(family: str, seed: int = 0) -> PreTrainedModel:
    """The model that the engine must agree with, in its plainest form. Its pad id equals its end of sequence."""
    arguments = tiny_config(family, pad_token_id=EOS, eos_token_id=EOS)
    config = AutoConfig.for_model(arguments.pop("model_type"), **arguments)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


def request(number: int, *, length: int, samples: int = 3) -> GenerateRequest:
    tokens = [3 + (7 * number + 5 * t) % 120 for t in range(length)]
    return GenerateRequest(
        request_id=number, prompt_tokens=tokens, seeds=tuple(1000 * number + s for s in range(samples))
    )


def requests(*lengths: int, samples: int = 3) -> list[GenerateRequest]:
    return [request(number, length=length, samples=samples) for number, length in enumerate(lengths)]


def recomputed(family: str, prompt: Sequence[int], sample: Sample, scale: float = 1.0) -> torch.Tensor:
    """[N, V] log-probabilities of the reference before each token of the response."""
    ids = torch.tensor([[*prompt, *sample.token_ids.tolist()]])
    with torch.no_grad():
        logits = reference(family)(ids).logits[0].float() / scale
    return torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]


def same(one: Sequence[GenerateResult], other: Sequence[GenerateResult], *, atol: float = 1e-4) -> None:
    """The same ids and reasons, log-probabilities up to rounding."""
    for first, second in zip(one, other, strict=True):
        assert first.request_id == second.request_id
        for a, b in zip(first.samples, second.samples, strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            np.testing.assert_allclose(a.log_probs, b.log_probs, atol=atol)
            assert a.finish_reason == b.finish_reason


def repeatable(engine: RolloutEngine, *, max_new_tokens: int) -> SamplingParams:
    """Sampling that gives the same ids twice: an engine that is not reproducible repeats greedy ones only."""
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=1.0 if engine.reproducible else 0.0)


def greedy_tokens_are_those_of_the_model(make: EngineFactory) -> None:
    given = requests(1, 4, 9, 9, 17, samples=1)
    for asked, result in zip(
        given, make().generate(given, SamplingParams(temperature=0, max_new_tokens=12)), strict=True
    ):
        expected = recomputed(make.family, asked.prompt_tokens, result.samples[0]).argmax(dim=-1)
        assert result.samples[0].token_ids.tolist() == expected.tolist()


def log_probs_equal_a_full_forward_pass(make: EngineFactory) -> None:
    given = requests(1, 4, 9, 17)
    engine = make()
    for sampling in (
        SamplingParams(max_new_tokens=12, stop_token_ids=STOPS),
        SamplingParams(max_new_tokens=12, temperature=0.7, top_p=0.8, top_k=50, min_new_tokens=4, stop_token_ids=STOPS),
        SamplingParams(max_new_tokens=6, temperature=0),
    ):
        for asked, result in zip(given, engine.generate(given, sampling), strict=True):
            for sample in result.samples:
                table = recomputed(make.family, asked.prompt_tokens, sample, sampling.scale).numpy()
                expected = table[np.arange(len(sample.token_ids)), sample.token_ids]
                tolerance = max(1e-4, engine.metadata.log_prob_tolerance)
                np.testing.assert_allclose(sample.log_probs, expected, atol=tolerance)


def samples_of_a_group_differ(make: EngineFactory) -> None:
    (result,) = make().generate(requests(5, samples=4), SamplingParams(max_new_tokens=16))
    assert len({tuple(sample.token_ids.tolist()) for sample in result.samples}) == 4


def samples_do_not_depend_on_their_batch(make: EngineFactory) -> None:
    if not make().reproducible:
        pytest.skip("the engine declares that it is not reproducible")
    given = requests(3, 8, 1, 8, 14, samples=4)
    sampling = SamplingParams(max_new_tokens=16, stop_token_ids=STOPS)
    together = make().generate(given, sampling)
    engine = make()
    same(together, [engine.generate([each], sampling)[0] for each in given])
    same(together, list(reversed(engine.generate(list(reversed(given)), sampling))))
    # A budget of two rows: groups are cut in pieces.
    same(together, make(max_batch_tokens=64).generate(given, sampling))


def the_stop_token_ends_a_response_and_is_kept(make: EngineFactory) -> None:
    sampling = SamplingParams(max_new_tokens=10, stop_token_ids=STOPS)
    reasons = set()
    for result in make().generate(requests(2, 6, 6, 11, samples=8), sampling):
        for sample in result.samples:
            ids = sample.token_ids.tolist()
            assert not set(ids[:-1]) & set(STOPS)
            assert (sample.finish_reason == "stop") == (ids[-1] in STOPS)
            assert sample.finish_reason == "stop" or len(ids) == 10
            reasons.add(sample.finish_reason)
    assert reasons == {"stop", "length"}


def responses_have_at_least_the_minimum_length(make: EngineFactory) -> None:
    sampling = SamplingParams(max_new_tokens=8, min_new_tokens=5, stop_token_ids=STOPS)
    for result in make().generate(requests(2, 6, samples=8), sampling):
        for sample in result.samples:
            assert not set(sample.token_ids[:5].tolist()) & set(STOPS)
            assert len(sample.token_ids) > 5 or sample.finish_reason == "length"


def a_pad_id_that_is_the_end_of_sequence_counts_as_any_token(make: EngineFactory) -> None:
    """Field fault 16. EOS is the pad id too; where it does not stop, it is in the middle of responses, counted."""
    inside = 0
    for result in make().generate(requests(2, 5, 9, samples=40), SamplingParams(max_new_tokens=12)):
        for sample in result.samples:
            assert len(sample.token_ids) == 12
            inside += int((sample.token_ids[:-1] == EOS).any())
    assert inside, "no response holds the id: this test shows nothing"
    for result in make().generate(requests(2, 5, samples=40), SamplingParams(max_new_tokens=12, stop_token_ids=(EOS,))):
        for sample in result.samples:
            assert (sample.token_ids == EOS).sum() == (sample.finish_reason == "stop")


def only_the_most_likely_tokens_are_sampled(make: EngineFactory) -> None:
    given = requests(4, 7, samples=6)
    engine = make()
    for asked, result in zip(given, engine.generate(given, SamplingParams(max_new_tokens=6, top_k=3)), strict=True):
        for sample in result.samples:
            table = recomputed(make.family, asked.prompt_tokens, sample)
            rank = (table > table.gather(1, torch.tensor(sample.token_ids).long()[:, None])).sum(dim=1)
            assert int(rank.max()) < 3
    for asked, result in zip(given, engine.generate(given, SamplingParams(max_new_tokens=6, top_p=0.5)), strict=True):
        for sample in result.samples:
            table = recomputed(make.family, asked.prompt_tokens, sample).exp()
            own = table.gather(1, torch.tensor(sample.token_ids).long()[:, None])
            assert float((table * (table > own)).sum(dim=1).max()) < 0.5


def any_number_of_requests_and_samples(make: EngineFactory) -> None:
    engine = make()
    sampling = SamplingParams(max_new_tokens=3)
    assert engine.generate([], sampling) == []
    none, one = engine.generate([request(0, length=3, samples=0), request(1, length=1, samples=1)], sampling)
    assert none.samples == () and len(one.samples[0].token_ids) == 3
    many = engine.generate(requests(*range(1, 30), samples=2), SamplingParams(max_new_tokens=1))
    assert [result.request_id for result in many] == list(range(29))
    assert all(len(sample.token_ids) == 1 for result in many for sample in result.samples)


def turns_go_on_from_the_ids_of_those_before(make: EngineFactory) -> None:
    """An episode: sampled ids and observations as the next prompt, three times; a prefix cache changes nothing."""
    engine = make()
    sampling = SamplingParams(max_new_tokens=5, stop_token_ids=STOPS)
    histories = [list(each.prompt_tokens) for each in requests(9, 4, 17, samples=1)]
    for turn in range(3):
        given = [
            GenerateRequest(request_id=number, prompt_tokens=tuple(history), seeds=(100 * turn + number,))
            for number, history in enumerate(histories)
        ]
        for history, result in zip(histories, engine.generate(given, sampling), strict=True):
            (sample,) = result.samples
            table = recomputed(make.family, history, sample).numpy()
            expected = table[np.arange(len(sample.token_ids)), sample.token_ids]
            np.testing.assert_allclose(sample.log_probs, expected, atol=max(1e-4, engine.metadata.log_prob_tolerance))
            history += [*sample.token_ids.tolist(), 90, 91 + turn, 92]


def generation_follows_new_weights(make: EngineFactory) -> None:
    """Field faults 22 and 23: nothing of the old weights is left, and every token names its version."""
    engine = make()
    given, sampling = requests(6, 9), repeatable(engine, max_new_tokens=8)
    before = engine.generate(given, sampling)
    other = reference(make.family, seed=1)
    make.write(engine, other)
    engine.set_version(7)
    after = engine.generate(given, sampling)
    assert [r.samples[0].token_ids.tolist() for r in before] != [r.samples[0].token_ids.tolist() for r in after]
    assert {int(v) for r in after for s in r.samples for v in s.policy_version} == {7}
    fresh = make()
    make.write(fresh, other)
    fresh.set_version(7)
    same(after, fresh.generate(given, sampling))
    assert weights_checksum(engine.weights()) == weights_checksum(fresh.weights())


def sleep_and_wake_change_nothing(make: EngineFactory) -> None:
    engine = make()
    given, sampling = requests(6, 9), repeatable(engine, max_new_tokens=8)
    before = engine.generate(given, sampling)
    engine.sleep()
    with pytest.raises(EngineError, match="asleep"):
        engine.generate(given, sampling)
    engine.wake()
    same(before, engine.generate(given, sampling))


def impossible_requests_are_refused(make: EngineFactory) -> None:
    engine = make()
    with pytest.raises(ValueError, match="empty prompt"):
        request(0, length=0)
    with pytest.raises(ValueError, match="vocabulary"):
        engine.generate(
            [GenerateRequest(request_id=0, prompt_tokens=[500], seeds=(0,))], SamplingParams(max_new_tokens=1)
        )
    with pytest.raises(ValueError, match="positions"):
        engine.generate(requests(10), SamplingParams(max_new_tokens=10_000))


CHECKS: tuple[Callable[[EngineFactory], None], ...] = (
    greedy_tokens_are_those_of_the_model,
    log_probs_equal_a_full_forward_pass,
    samples_of_a_group_differ,
    samples_do_not_depend_on_their_batch,
    the_stop_token_ends_a_response_and_is_kept,
    responses_have_at_least_the_minimum_length,
    a_pad_id_that_is_the_end_of_sequence_counts_as_any_token,
    only_the_most_likely_tokens_are_sampled,
    any_number_of_requests_and_samples,
    turns_go_on_from_the_ids_of_those_before,
    generation_follows_new_weights,
    sleep_and_wake_change_nothing,
    impossible_requests_are_refused,
)
