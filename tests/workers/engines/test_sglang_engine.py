"""Real SGLang on a CPU against the compliance suite, and its weights in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.sockets import listening
from tests.workers.engines import compliance, sglang_models
from tests.workers.engines.sglang_models import SglangFactory
from workers.engines.base import SamplingParams


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangFactory]:
    with sglang_models.usable_sglang():
        # A second engine only where a check compares two.
        num_engines = 2 if request.param == "llama" else 1
        factory = SglangFactory(request.param, tmp_path_factory.mktemp("run"), num_engines=num_engines)
        try:
            yield factory
        finally:
            factory.close()


@pytest.mark.parametrize("check", compliance.CHECKS, ids=lambda check: check.__name__)
def test_compliance(check: Callable[[compliance.EngineFactory], None], make: SglangFactory) -> None:
    check(make)


def test_weights_are_the_engine_s_own_memory(make: SglangFactory) -> None:
    """The bytes change where they are: the same addresses before and after, and the engine computes with them."""
    engine = make()
    addresses = {name: tensor.data_ptr() for name, tensor in engine.weights().items()}
    with torch.no_grad():
        engine.weights()["model.norm.weight"].zero_()
    engine.set_version(1)
    (result,) = engine.generate(compliance.requests(5, samples=1), SamplingParams(temperature=0, max_new_tokens=4))
    assert addresses == {name: tensor.data_ptr() for name, tensor in engine.weights().items()}
    # Logits of zero: a uniform distribution, and the first id.
    assert result.samples[0].token_ids.tolist() == [0, 0, 0, 0]
    np.testing.assert_allclose(result.samples[0].log_probs, -np.log(128), rtol=1e-5)


def test_it_listens_on_the_loopback_address(make: SglangFactory) -> None:
    launcher = make().launcher_pid
    assert launcher is not None
    found = listening([launcher])
    assert set().union(*found.values()) == {"127.0.0.1"}


def test_a_sequence_may_fill_every_position(make: SglangFactory) -> None:
    (result,) = make().generate(compliance.requests(500, samples=1), SamplingParams(max_new_tokens=12))
    assert len(result.samples[0].token_ids) == 12
