"""Real SGLang beside two FSDP2 ranks: newest weights in place, and a killed engine that comes back."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM

from configs.schema import RunConfig
from tests.gloo import run_ranks
from tests.models import tiny_model_dir
from tests.workers.engines.sglang_models import usable_sglang
from tests.workers.reference import grouped_rollouts, run_config
from workers.engine_link import EngineLink
from workers.engines.base import GenerateRequest, SamplingParams
from workers.engines.sglang.engine import SglangEngine
from workers.process_group import PoolGroup
from workers.role_model import RoleModel

PROMPTS = ([5, 6, 7], [20, 21], [33], [40, 41, 42, 43])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("link")
    model = tiny_model_dir(folder, "qwen2", seed=3)
    with usable_sglang():
        return run_ranks(use_engines, 2, str(model), str(folder), timeout_s=400)


def use_engines(rank: int, world_size: int, model: str, folder: str) -> dict[str, Any]:
    """Update, generate, also from sleep; then the first rank's engine is killed, and both generate again.

    Last, it is killed between two calls.
    """
    logging.basicConfig(filename=f"{folder}/rank-{rank}.log", level=logging.INFO, force=True)
    config = config_of(model)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    actor = RoleModel.build("actor", config, mesh, torch.device("cpu"))
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    group = PoolGroup(rank=rank, size=world_size, control=control, writers=control)
    link = EngineLink(config, actor, group=group, device=torch.device("cpu"), run_dir=Path(folder), rank=rank)
    try:
        link.sync()
        before = greedy(link, rank)
        actor.update([grouped_rollouts([4, 3], [[5, 6], [4, 7]], seed=rank)], "clipped", seed=0)
        transition = link.sync()
        after, first_weights = greedy(link, rank), actor.full_state()
        assert isinstance(link.engine, SglangEngine)
        link.sleep()
        actor.update([grouped_rollouts([4, 3], [[5, 6], [4, 7]], seed=rank)], "clipped", seed=1)
        link.sync(waking=True)
        link.wake()
        assert link._transition is not None
        link._transition.verify()
        awake = greedy(link, rank)
        if rank == 0 and (pid := link.engine.launcher_pid) is not None:
            os.kill(pid, signal.SIGKILL)
        again = greedy(link, rank)
        nothing = link.sync()
        if rank == 0 and (pid := link.engine.launcher_pid) is not None:
            os.kill(pid, signal.SIGKILL)
            while link.engine.launcher_pid is not None:
                time.sleep(0.01)
        link.sync()
        return {
            "before": before, "after": after, "awake": awake, "again": again,
            "log": Path(f"{folder}/rank-{rank}.log").read_text(),
            "transition": transition, "nothing": nothing, "direct": link.writes_directly,
            "first_weights": first_weights, "weights": actor.full_state(),
        }  # fmt: skip
    finally:
        link.close()


def config_of(model: str, **rollout: Any) -> RunConfig:
    return run_config(
        Path(model),
        rollout={"engine": "sglang", "start_timeout_s": 240, **rollout},
        actor={"optimizer": {"lr": 0.05}},
        algorithm="grpo",
        kl={"placement": "none"},
        loss={"rollout_correction": "none"},
    )


@pytest.fixture(scope="module")
def disjoint(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("disjoint")
    model = tiny_model_dir(folder, "qwen2", seed=3)
    with usable_sglang():
        return run_ranks(train_and_generate_apart, 2, str(model), str(folder), timeout_s=400)


def train_and_generate_apart(rank: int, world_size: int, model: str, folder: str) -> dict[str, Any]:
    """The first rank trains, the second has the engine and no model; the engine dies once."""
    config, device = config_of(model, verify_weights=True, weights_transport="collectives"), torch.device("cpu")
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    actor = RoleModel.build("actor", config, mesh, device) if rank == 0 else None
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    group = PoolGroup(rank=rank, size=world_size, control=control, writers=control)
    link = EngineLink(config, actor, group=group, device=device, run_dir=Path(folder), rank=rank, num_sources=1)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=8)
    mine = [GenerateRequest(request_id="a", prompt_tokens=PROMPTS[0], seeds=(0,))] if link.engine else []
    try:
        link.sync()
        if actor is not None:
            actor.update([grouped_rollouts([4, 3], [[5, 6], [4, 7]], seed=rank)], "clipped", seed=0)
        transition = link.sync()
        after = [result.samples[0] for result in link.generate(mine, sampling)]
        if isinstance(link.engine, SglangEngine) and (pid := link.engine.launcher_pid) is not None:
            os.kill(pid, signal.SIGKILL)
        again = [result.samples[0] for result in link.generate(mine, sampling)]
        said = [(s.token_ids.tolist(), int(s.policy_version[0])) for s in (*after, *again)]
        return {
            "said": said,
            "transition": transition,
            "direct": link.writes_directly,
            "weights": actor.full_state() if actor else {},
        }
    finally:
        link.close()


def test_engines_on_ranks_of_their_own_follow_the_training_ranks(
    disjoint: list[dict[str, Any]], tmp_path: Path
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_dir(tmp_path, "qwen2", seed=3)).eval()
    before = greedy_of(reference, PROMPTS[0])
    reference.load_state_dict(disjoint[0]["weights"], strict=False)
    expected = (greedy_of(reference, PROMPTS[0]), 1)
    assert disjoint[0]["said"] == [] and expected[0] != before
    assert disjoint[1]["said"] == [expected, expected]  # also from the engine that was started again
    whole_gb = sum(tensor.nbytes for tensor in disjoint[0]["weights"].values()) / 1e9
    for rank in disjoint:  # the training rank, which receives nothing, says what the engine's does
        assert rank["transition"]["reshard_received_gb"] == whole_gb and not rank["direct"]


def greedy_of(model: Any, prompt: list[int]) -> list[int]:
    """8 tokens by plain forward passes."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(8):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    tokens: list[int] = ids[0, len(prompt) :].tolist()
    return tokens


def greedy(link: EngineLink, rank: int) -> list[tuple[list[int], int]]:
    requests = [GenerateRequest(request_id=i, prompt_tokens=p, seeds=(0,)) for i, p in enumerate(PROMPTS[rank::2])]
    results = link.generate(requests, SamplingParams(temperature=0.0, max_new_tokens=8))
    return [(r.samples[0].token_ids.tolist(), int(r.samples[0].policy_version[0])) for r in results]


def test_after_an_update_the_engine_says_what_the_updated_model_says(
    ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_dir(tmp_path, "qwen2", seed=3)).eval()
    for number, (weights, said) in enumerate((("first_weights", "after"), ("weights", "awake")), 1):
        reference.load_state_dict(ranks[0][weights], strict=False)
        for rank, result in enumerate(ranks):
            for prompt, (tokens, version) in zip(PROMPTS[rank::2], result[said], strict=True):
                assert tokens == greedy_of(reference, prompt)
                assert version == number


def test_the_update_changed_what_is_said(ranks: list[dict[str, Any]]) -> None:
    assert any(result["before"] != result["after"] for result in ranks)
    assert all(version == 0 for result in ranks for _, version in result["before"])


def test_a_killed_engine_comes_back_with_the_current_weights(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["again"] == result["awake"]


def test_the_log_says_once_a_transition_how_weights_travel_and_that_an_engine_was_started_again(
    ranks: list[dict[str, Any]],
) -> None:
    first, second = (result["log"] for result in ranks)
    for log in (first, second):  # the engines' start, and two deaths of the first
        assert log.count("INFO:workers.engine_link:new weights reach the engines directly") == 3
    again = "WARNING:workers.engine_link:sglang engine: "
    assert first.count("its processes have ended since its last call; starting it again") == 1
    assert first.count(again) == 2 and again not in second


def test_a_transition_is_measured_and_happens_once_per_version(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["transition"]["reshard_received_gb"] > 0 and result["direct"]
        assert result["nothing"] == {}
