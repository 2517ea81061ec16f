from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.schema import RunConfig
from tests.gloo import run_ranks
from tests.models import tiny_model_dir
from tests.workers.reference import build, grouped_rollouts, run_config, world_mesh

ROLLOUTS = grouped_rollouts([3], [[2, 4]])


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_an_engine_in_another_dtype_gets_the_trained_weights(tmp_path: Path, family: str) -> None:
    folder = tiny_model_dir(tmp_path, family)
    actor = build("actor", run_config(folder, actor={"optimizer": {"lr": 1e-2}}))
    actor.update([ROLLOUTS], "sft", seed=0)
    engine = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    actor.copy_full_parameters_into(dict(engine.named_parameters(remove_duplicate=False)))
    for name, tensor in actor.full_state().items():
        assert torch.equal(engine.get_parameter(name), tensor.to(torch.bfloat16)), name


def test_a_tied_head_may_go_by_either_name(tmp_path: Path) -> None:
    actor = build("actor", run_config(tiny_model_dir(tmp_path, "gemma")))
    weights = {n: torch.zeros_like(t) for n, t in actor.full_state().items()}
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    actor.copy_full_parameters_into(weights)
    assert torch.equal(weights["lm_head.weight"], actor.full_state()["model.embed_tokens.weight"])


def test_fault_21_names_that_do_not_match_are_listed(tmp_path: Path) -> None:
    actor = build("actor", run_config(tiny_model_dir(tmp_path)))
    weights = {n: torch.zeros_like(t) for n, t in actor.full_state().items()}
    weights["model.extra"] = torch.zeros(1)
    weights["lm_head.weight"] = torch.zeros(3, 3)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"\(3\)") as caught:
        actor.copy_full_parameters_into(weights)
    for phrase in ("model.extra is unknown", "model.norm.weight is missing", "lm_head.weight has shape (3, 3)"):
        assert phrase in str(caught.value)
    assert not any(t.any() for t in weights.values())


def copies(rank: int, world_size: int, config: RunConfig, broken_rank: int | None) -> str | bool:
    actor = build("actor", config, world_mesh())
    actor.compute_log_prob(ROLLOUTS)  # leaves the root gathered, were it not resharded
    expected = actor.full_state()
    weights = {n: torch.zeros_like(t) for n, t in expected.items()}
    if rank == broken_rank:
        del weights["lm_head.weight"]
    try:
        actor.copy_full_parameters_into(weights if rank != 2 else None)
    except ValueError as error:
        return str(error)
    return rank == 2 or all(torch.equal(weights[n], t) for n, t in expected.items())


def test_every_rank_gets_whole_parameters_and_none_hangs_on_anothers_mistake(tmp_path: Path) -> None:
    config = run_config(tiny_model_dir(tmp_path))
    assert run_ranks(copies, 3, config, None) == [True, True, True]
    first, second, third = run_ranks(copies, 3, config, 1)
    assert "lm_head.weight is missing" in second
    assert "another rank" in first and "another rank" in third
