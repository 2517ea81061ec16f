"""Field fault 29: the engine drops one request and the sampler waits for ever."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence

import pytest

from tests.workers.engines import compliance
from workers.engines.base import EngineError, GenerateRequest, GenerateResult, SamplingParams
from workers.engines.dispatch import generate_all
from workers.engines.torch_engine import TorchEngine

SAMPLING = SamplingParams(max_new_tokens=4)


class ForgetfulEngine(TorchEngine):
    """Loses request 1 in its first `losses` calls."""

    losses = 1

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[GenerateResult]:
        results = super().generate(requests, sampling)
        self.losses -= 1
        return results if self.losses < 0 else [result for result in results if result.request_id != 1]


def forgetful(losses: int) -> ForgetfulEngine:
    engine = ForgetfulEngine(copy.deepcopy(compliance.reference("llama")))
    engine.losses = losses
    return engine


def test_a_lost_request_is_logged_and_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    given = compliance.requests(3, 5, 2)
    with caplog.at_level(logging.WARNING):
        results = generate_all(forgetful(1), given, SAMPLING)
    assert "requests 1 " in caplog.text
    compliance.same(results, forgetful(0).generate(given, SAMPLING))


def test_a_request_lost_again_and_again_is_an_error_that_names_it() -> None:
    with pytest.raises(EngineError, match=r"torch engine: no complete result for requests 1 in 2 attempts"):
        generate_all(forgetful(5), compliance.requests(3, 5, 2), SAMPLING)


def test_ids_that_occur_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="must differ"):
        generate_all(forgetful(0), [compliance.request(0, length=2)] * 2, SAMPLING)
