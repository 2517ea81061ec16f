from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.models import FAMILIES, tiny_config
from tests.workers.engines import compliance
from workers.engines.base import EngineError, RolloutEngine, SamplingParams
from workers.engines.torch_engine import TorchEngine


class TorchFactory:
    def __init__(self, family: str) -> None:
        self.family = family

    def __call__(self, *, max_batch_tokens: int = 65536) -> TorchEngine:
        return TorchEngine(copy.deepcopy(compliance.reference(self.family)), max_batch_tokens=max_batch_tokens)

    def write(self, engine: RolloutEngine, model: PreTrainedModel) -> None:
        weights, parameters = engine.weights(), dict(model.named_parameters())
        assert set(weights) == set(parameters)
        with torch.no_grad():
            for name, tensor in weights.items():
                tensor.copy_(parameters[name])


@pytest.mark.parametrize("check", compliance.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compliance(check: Callable[[compliance.EngineFactory], None], family: str) -> None:
    check(TorchFactory(family))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("llama", "gemma2")])
def test_every_family_generates_what_the_model_says(family: str) -> None:
    compliance.greedy_tokens_are_those_of_the_model(TorchFactory(family))
    compliance.log_probs_equal_a_full_forward_pass(TorchFactory(family))


def test_tied_weights_are_listed_once() -> None:
    names = TorchFactory("gemma2")().weights()
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_weights_with_nan_are_an_engine_error() -> None:
    engine = TorchFactory("llama")()
    with torch.no_grad():
        engine.weights()["model.norm.weight"].fill_(float("nan"))
    engine.set_version(1)
    with pytest.raises(EngineError, match="not finite"):
        engine.generate(compliance.requests(3), SamplingParams(max_new_tokens=2))


def test_bfloat16_log_probs_are_near_those_of_float32() -> None:
    model = copy.deepcopy(compliance.reference("llama"))
    engine = TorchEngine(model, dtype=torch.bfloat16)
    (asked,) = compliance.requests(6)
    (result,) = engine.generate([asked], SamplingParams(max_new_tokens=8))
    for sample in result.samples:
        table = compliance.recomputed("llama", asked.prompt_tokens, sample)
        expected = table.gather(1, torch.tensor(sample.token_ids).long()[:, None])[:, 0]
        assert float((torch.tensor(sample.log_probs) - expected).abs().max()) < engine.metadata.log_prob_tolerance


def test_a_model_with_other_layers_is_refused() -> None:
    config = AutoConfig.for_model(
        "mamba", vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4, intermediate_size=32
    )
    with pytest.raises(ValueError, match="full or sliding attention"):
        TorchEngine(AutoModelForCausalLM.from_config(config))


def test_a_prompt_is_computed_once_for_its_group() -> None:
    engine = TorchFactory("llama")()
    seen: list[int] = []
    hook = engine._model.get_input_embeddings().register_forward_pre_hook(
        lambda module, arguments: seen.append(arguments[0].numel())
    )
    engine.generate(compliance.requests(20, 7, samples=8), SamplingParams(max_new_tokens=3))
    hook.remove()
    assert seen == [27, 16, 16]


def test_finished_samples_leave_the_batch() -> None:
    engine = TorchFactory("llama")()
    seen: list[int] = []
    engine._model.get_input_embeddings().register_forward_pre_hook(
        lambda module, arguments: seen.append(arguments[0].numel())
    )
    results = engine.generate(
        compliance.requests(4, 9, samples=6), SamplingParams(max_new_tokens=20, stop_token_ids=compliance.STOPS)
    )
    lengths = [len(sample.token_ids) for result in results for sample in result.samples]
    assert seen[1:] == [sum(length > step for length in lengths) for step in range(1, max(lengths))]


def test_long_sliding_windows_fit_too() -> None:
    """A window shorter than the prompt, one between prompt and response, one that is never reached."""
    for window in (2, 11, 300):
        arguments = tiny_config("gemma3_text", sliding_window=window)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(arguments.pop("model_type"), **arguments), attn_implementation="eager"
        ).eval()
        engine = TorchEngine(copy.deepcopy(model))
        given = compliance.requests(9, 3, samples=2)
        for asked, result in zip(given, engine.generate(given, SamplingParams(max_new_tokens=8)), strict=True):
            for sample in result.samples:
                ids = torch.tensor([[*asked.prompt_tokens, *sample.token_ids.tolist()]])
                with torch.no_grad():
                    table = torch.log_softmax(model(ids).logits[0], dim=-1)[len(asked.prompt_tokens) - 1 : -1]
                expected = table.gather(1, torch.tensor(sample.token_ids).long()[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(sample.log_probs), expected, atol=1e-4, rtol=0)
