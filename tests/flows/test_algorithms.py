"""Each algorithm beside PPO through the whole chain: Prefect, Dask, two FSDP2 ranks, Zarr, checkpoints."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from configs.checks import check_config
from configs.loader import apply_overrides
from configs.schema import RunConfig
from flows.run import RunSummary, session
from pipeline.rollouts import Rollouts
from pipeline.trace import trace
from storage.checkpoints import CheckpointStore
from storage.metrics import read_metrics
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from tests.flows.scorers import vowel_cost
from tests.flows.tiny_runs import ppo_config, write_inputs
from tests.models import tiny_model_dir
from workers.checkpoint_io import read_model

ONE = {"num_iterations": 1, "num_mini_batches": 1}
PAIRS = [
    {
        "prompt": p,
        "response": "yes",
        "chosen": "no",
        "rejected": "yes!",
        "chosen_is_safe": i > 0,
        "rejected_is_safe": False,
    }
    for i, p in enumerate(("a", "bc", "def"))
]


def write_rows(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


FAILS = "tests.workers.reward_examples:fails_on_vowels"
DAPO: dict[str, Any] = {
    "name": "dapo",
    "algorithm": "dapo",
    "rollout": {
        "num_samples": 2,
        "max_new_tokens": 6,
        "gap_alarm": 1e-12,
        "dynamic_sampling": None,
        "temperature": 0.8,
        "top_p": 0.95,
        "top_k": 200,
        "min_new_tokens": 2,
    },
    "rewards": {
        "model_weight": 0.0,
        "functions": [{"path": FAILS, "on_error": "zero"}],
        "over_long": {"buffer": 3, "weight": 0.5},
    },
    "advantage": {"filter_groups": True},
    "kl": {"placement": "loss", "estimator": "k3", "coef": 0.01},
    "training": {"num_iterations": 2, "num_mini_batches": 1},
}


def configurations(folder: Path) -> dict[str, RunConfig]:
    """One small run of each algorithm."""
    inputs = write_inputs(folder)
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("plain words", "more of them", "x")))
    cost = str(tiny_model_dir(folder, "llama", scalar=True, seed=3))
    scorers = str(Path(__file__).with_name("scorers.py"))
    safe = {
        "algorithm": "safe_rlhf",
        "output": str(folder),
        "cost": {"path": "checkpoint:cost_model/cost"},
        "costs": {"functions": [{"path": f"{scorers}:vowel_cost"}], "model_weight": 0.5},
        "safety": {"cost_limit": 0.1, "multiplier_lr": 0.5},
        "kl": {"coef": 0.05, "target": 0.01, "horizon": 20},
        "data": {"pretraining": {"path": str(texts)}, "pretraining_batch_size": 3},
    }
    pairs = write_rows(folder / "pairs.jsonl", PAIRS)
    data = {"train": {"path": pairs}, "validation": {"path": pairs}, "batch_size": 2}
    supervised = {"data": data, "training": ONE, "evaluation": {"every": 1}}
    return {
        "dpo": ppo_config(inputs, name="dpo", algorithm="dpo", **supervised),
        "cost_model": ppo_config(
            inputs,
            name="cost_model",
            algorithm="cost_model",
            cost={"path": cost, "optimizer": {"lr": 1e-2}},
            **supervised,
        ),
        "sft": ppo_config(inputs, name="sft", algorithm="sft", **supervised),
        "safe_rlhf": ppo_config(inputs, name="safe", **safe),
        "one_critic": ppo_config(
            inputs, name="one_critic", **{**safe, "safety": {"cost_critic": False}, "training": ONE}
        ),
        "remax": ppo_config(
            inputs,
            name="remax",
            algorithm="remax",
            actor={"path": inputs["actor"], "optimizer": FAR},
            training={**ONE, "num_epochs": 2},
            kl={"coef": 0.01},
        ),
        "dapo": ppo_config(inputs, **DAPO),
        **{name: ppo_config(inputs, name=name, **dynamic(folder), **where) for name, where in PLACES.items()},
    }


FAR = {"lr": 0.5, "eps": 1.0, "max_grad_norm": None}
"""Adam moves by about lr times the gradient, so that rounding is no matter, and the second epoch is off policy."""
PLACES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "dynamic_apart": {
        "resources": {
            "pools": {"policy": {"ranks": 1}, "judge": {"ranks": 1}},
            "placement": {"actor": "policy", "reward": "judge"},
        }
    },
}
NAMES = tuple(f"{'good' if n % 3 == 0 else 'bad'} {n}" for n in range(20))


def dynamic(folder: Path) -> dict[str, Any]:
    """Groups of two; those of `good` prompts differ in the part that decides, in the reward model's score all do."""
    prompts = write_rows(folder / "names.jsonl", [{"prompt": name} for name in NAMES])
    functions = ({"path": "tests.workers.rewards_by_name:by_name"}, {"path": FAILS, "on_error": "zero"})
    sampling = {"max_rounds": 2, "part": "by_name"}
    return {
        "algorithm": "grpo",
        "data": {"train": {"path": prompts}},
        "rewards": {"functions": list(functions)},
        "rollout": {"dynamic_sampling": sampling},
        "kl": {"placement": "none"},
        "advantage": {"estimator": "group"},
        "training": ONE,
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, prefect_server: object) -> dict[str, RunSummary]:
    """Every run, in one session."""
    folder = tmp_path_factory.mktemp("runs")
    configs = configurations(folder)

    async def everything() -> dict[str, RunSummary]:
        first = next(iter(configs.values()))
        async with session(first, parent=folder, num_workers=2, quiet=True) as open_session:
            done = {name: await open_session.run(config) for name, config in configs.items()}
            directory = RunDirectory.open(done["safe_rlhf"].run_dir)
            longer = apply_overrides(directory.config(), ["training.num_iterations=3"])
            return {**done, "resumed": await open_session.resume(directory, longer)}

    return asyncio.run(everything())


def named(row_set: str, columns: set[str]) -> set[str]:
    return {f"{row_set}/{column}" if row_set else column for column in columns}


ALGORITHMS = ("dpo", "cost_model", "sft", "remax", "safe_rlhf", "one_critic", "dapo", "dynamic")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_ran_is_what_was_traced(finished: dict[str, RunSummary], algorithm: str) -> None:
    directory = RunDirectory.open(finished[algorithm].run_dir)
    assert finished[algorithm].status == "completed"
    expected = {call.stage: call for call in trace(directory.config())}
    stages = RolloutStore(directory.rollouts).stages(0)
    held_out = {name for name, stage in stages.items() if stage.row_set.startswith("validation") or "evaluate" in name}
    made = {name: stage for name, stage in stages.items() if name not in held_out}
    ran = {name.partition("#")[0] if algorithm == "dpo" else name: stage for name, stage in made.items()}
    assert set(ran) == set(expected)
    for name, call in expected.items():
        record = ran[name]
        written = {c for c in record.columns if not c.startswith(("reward/", "cost/"))}
        assert named(record.row_set, written) == set(call.writes)


def test_remax_subtracts_the_reward_of_the_greedy_response(finished: dict[str, RunSummary]) -> None:
    directory = RunDirectory.open(finished["remax"].run_dir)
    store = RolloutStore(directory.rollouts)
    batch, greedy = store.read(0), store.read(0, row_set="greedy")
    assert greedy["group"].tolist() == sorted(set(batch["group"].tolist())), "one greedy response a prompt"
    baseline = dict(zip(greedy["group"].tolist(), greedy["reward"].tolist(), strict=True))
    for row in range(batch.num_rows):
        tokens = slice(batch.offsets[row] + batch["prompt_length"][row], batch.offsets[row + 1])
        following = np.cumsum(batch["token_rewards"][tokens].astype(float)[::-1])[::-1]
        expected = following - baseline[int(batch["group"][row])]
        assert np.allclose(batch["advantages"][tokens], expected, atol=1e-5)
    rows = read_metrics(directory.metrics)
    assert rows[0]["greedy/reward_mean"] == pytest.approx(float(greedy["reward"].mean()))
    assert rows[0]["baseline_mean"] == pytest.approx(float(greedy["reward"].mean()))
    assert rows[0]["reward_mean"] == pytest.approx(float(batch["reward"].mean()))


def test_the_multiplier_follows_the_mean_cost_and_is_in_the_checkpoint(finished: dict[str, RunSummary]) -> None:
    directory = RunDirectory.open(finished["safe_rlhf"].run_dir)
    store, rows = RolloutStore(directory.rollouts), read_metrics(directory.metrics)
    log_multiplier = 0.0
    for iteration in (0, 1):
        cost = float(store.read(iteration, columns=["cost"])["cost"].mean())
        assert rows[iteration]["cost_mean"] == pytest.approx(cost)
        assert rows[iteration]["cost_multiplier"] == pytest.approx(math.exp(log_multiplier))
        log_multiplier += 0.5 * math.exp(log_multiplier) * (cost - 0.1)
        checkpoint = next(c for c in CheckpointStore(directory.checkpoints).committed() if c.step == iteration + 1)
        assert checkpoint.state["log_cost_multiplier"] == pytest.approx(log_multiplier)
    assert rows[1]["cost_multiplier"] != 1.0


def test_the_kl_coefficient_adapts_is_in_the_checkpoint_and_goes_on_in_a_resumed_run(
    finished: dict[str, RunSummary],
) -> None:
    """By hand: beta * exp(clip(KL / target - 1, 0.2) * rows / horizon), and the penalty is beta times the KL."""
    directory = RunDirectory.open(finished["resumed"].run_dir)
    store, coef = RolloutStore(directory.rollouts), 0.05
    checkpoints = {c.step: c.state["kl_coef"] for c in CheckpointStore(directory.checkpoints).committed()}
    for iteration, row in enumerate(read_metrics(directory.metrics)):
        assert row["kl_penalty"] == pytest.approx(coef * row["kl"], rel=1e-5, abs=1e-9)
        error = min(max(row["kl"] / 0.01 - 1, -0.2), 0.2)
        coef *= math.exp(error * store.read(iteration, columns=["reward"]).num_rows / 20)
        assert checkpoints[iteration + 1] == pytest.approx(coef)
    assert coef != pytest.approx(0.05) and len(checkpoints) == 3


def test_costs_are_the_models_score_and_the_functions(finished: dict[str, RunSummary]) -> None:
    batch = RolloutStore(RunDirectory.open(finished["safe_rlhf"].run_dir).rollouts).read(1)
    for row in range(batch.num_rows):
        assert batch["cost/vowel_cost"][row] == pytest.approx(vowel_cost("", batch["text"][row], None))
    assert np.allclose(batch["cost"], 0.5 * batch["cost/model"] + batch["cost/vowel_cost"], atol=1e-6)


def test_the_cost_model_is_the_one_that_safety_preferences_trained(finished: dict[str, RunSummary]) -> None:
    """By the checkpoint's own scores, with a cost critic and with the cost model as the one extra model."""
    directory = RunDirectory.open(finished["cost_model"].run_dir)
    newest = CheckpointStore(directory.checkpoints).latest()
    assert newest is not None
    first, trained = (
        AutoModelForSequenceClassification.from_pretrained(directory.config().cost.path) for _ in range(2)
    )
    trained.load_state_dict(read_model(newest.path / "cost")[0].state_dict())
    for name in ("safe_rlhf", "one_critic"):
        batch = RolloutStore(RunDirectory.open(finished[name].run_dir).rollouts).read(0)
        scores: dict[Any, list[float]] = {trained: [], first: []}
        for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            ids = torch.from_numpy(batch["token_ids"][start:end].astype(np.int64))
            for model, found in scores.items():
                last = model.base_model(input_ids=ids[None]).last_hidden_state[0, -1]
                found.append(float((last @ model.score.weight.T).detach()))
        assert np.allclose(batch["cost/model"], scores[trained], atol=1e-5)
        assert not np.allclose(batch["cost/model"], scores[first], atol=1e-3), "it has been trained"
    assert "cost_values" not in batch


def test_the_pretraining_loss_is_learnt_beside_the_policy(finished: dict[str, RunSummary]) -> None:
    directory = RunDirectory.open(finished["safe_rlhf"].run_dir)
    texts = RolloutStore(directory.rollouts).read(1, row_set="pretraining")
    assert texts.num_rows == 3 and set(texts["text"]) == {"plain words", "more of them", "x"}
    row = read_metrics(directory.metrics)[1]
    assert (
        row["actor/pretraining_nll"] == pytest.approx(row["actor/pretraining_loss"])
        and row["actor/pretraining_nll"] > 0
    )
    assert row["pretraining/tokens"] == texts.num_tokens


def test_a_resumed_run_goes_on_with_the_multiplier(finished: dict[str, RunSummary]) -> None:
    """The third iteration, made by a resume, has the multiplier that the second one left."""
    rows = read_metrics(RunDirectory.open(finished["resumed"].run_dir).metrics)
    assert finished["resumed"].iterations == 3
    expected = math.log(rows[1]["cost_multiplier"]) + 0.5 * rows[1]["cost_multiplier"] * (rows[1]["cost_mean"] - 0.1)
    assert math.log(rows[2]["cost_multiplier"]) == pytest.approx(expected)


def test_metrics_have_the_values_computed_by_hand_from_the_stored_columns(finished: dict[str, RunSummary]) -> None:
    directory = RunDirectory.open(finished["dapo"].run_dir)
    store = RolloutStore(directory.rollouts)
    seen = {"reward_errors": 0.0, "filtered_samples": 0.0, "truncated": 0.0, "actor/tokens": 0.0}
    for iteration, metrics in enumerate(read_metrics(directory.metrics)):
        seen = {name: total + metrics[name] for name, total in seen.items()}
        batch = store.read(iteration)
        rows = [slice(a, b) for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]
        kept = [t for row in rows for t in range(row.start, row.stop) if batch["response_mask"][t]]
        lengths = [int(sum(batch["response_mask"][row])) for row in rows]
        too_long = [-min(max(length - 3, 0) / 3, 1.0) for length in lengths]
        failed = [any(v in str(text) for v in "aeiou") for text in batch["text"]]
        score = [
            0.0 if f else float(any(c.isdigit() for c in str(t))) for f, t in zip(failed, batch["text"], strict=True)
        ]
        reward = [s + 0.5 * p for s, p in zip(score, too_long, strict=True)]
        assert np.allclose(batch["reward"], reward) and np.allclose(batch["reward/over_long"], too_long)
        assert metrics["reward_errors"] == sum(failed)
        assert metrics["reward_mean"] == pytest.approx(float(np.mean(reward)))
        assert metrics["response_length_mean"] == pytest.approx(sum(lengths) / len(lengths))
        assert metrics["response_length_max"] == max(lengths)
        assert metrics["truncated"] == pytest.approx(sum(r == "length" for r in batch["finish_reason"]) / len(rows))
        same = {
            g
            for g in batch["group"].tolist()
            if len({r for r, h in zip(reward, batch["group"], strict=True) if h == g}) == 1
        }
        out = [g in same for g in batch["group"].tolist()]
        assert metrics["filtered_samples"] == sum(out)
        counted = [
            t
            for row, left in zip(rows, out, strict=True)
            for t in range(row.start, row.stop)
            if not left and batch["response_mask"][t]
        ]
        assert np.flatnonzero(batch["loss_mask"]).tolist() == counted
        assert metrics["actor/tokens"] == (len(counted) or 0)
        policy, reference = batch["log_probs"].astype(float), batch["ref_log_probs"].astype(float)
        assert metrics["kl_per_token"] == pytest.approx(
            sum(policy[t] - reference[t] for t in kept) / len(kept), abs=1e-7
        )
        assert metrics["kl"] == pytest.approx(sum(policy[t] - reference[t] for t in kept) / len(rows), abs=1e-6)
        gaps = [abs(policy[t] - float(batch["rollout_log_probs"][t])) for t in kept]
        assert metrics["rollout_gap_mean"] == pytest.approx(sum(gaps) / len(gaps))
        assert metrics["rollout_gap_max"] == pytest.approx(max(gaps))
        assert max(gaps) < 1e-4, "engine and actor mean the whole distribution, whatever restricts what is drawn"
        assert metrics["entropy_mean"] == pytest.approx(float(np.mean(batch["entropy"][kept])), rel=1e-5)
        if counted:  # one step: the policy is the one that the columns are of
            assert metrics["actor/clip_fraction"] == 0 and metrics["actor/approx_kl"] == pytest.approx(0, abs=1e-6)
            k3 = [np.exp(reference[t] - policy[t]) - 1 - (reference[t] - policy[t]) for t in counted]
            assert metrics["actor/kl_loss"] == pytest.approx(sum(k3) / len(k3), rel=1e-3, abs=1e-6)
            assert metrics["actor/loss"] == pytest.approx(
                metrics["actor/policy_loss"] + 0.01 * metrics["actor/kl_loss"], abs=1e-6
            )
    assert all(seen.values()), f"every number is to have been tried: {seen}"


def plain_log_probs(model: Any, batch: Rollouts) -> torch.Tensor:
    """[T], of every token but the first of a row (0), by the model's own forward pass of each row."""
    rows = []
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids = torch.from_numpy(batch["token_ids"][start:end].astype(np.int64))
        log_probs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        rows.append(torch.cat([torch.zeros(1), log_probs[:-1].gather(1, ids[1:, None])[:, 0]]))
    return torch.cat(rows)


def test_the_clip_fraction_of_a_second_epoch_is_that_of_plain_loops(finished: dict[str, RunSummary]) -> None:
    """The first step by hand, on a plain model and the stored columns; then the ratios of the model that it leaves."""
    directory = RunDirectory.open(finished["remax"].run_dir)
    config, batch = directory.config(), RolloutStore(directory.rollouts).read(0)
    model = AutoModelForCausalLM.from_pretrained(config.actor.path)
    old, advantages = (torch.from_numpy(batch[name]) for name in ("log_probs", "advantages"))
    kept = torch.from_numpy(np.flatnonzero(batch["response_mask"]))
    ratio = (plain_log_probs(model, batch) - old).exp()
    (-(ratio * advantages)[kept].mean()).backward()
    optimizer = torch.optim.Adam(model.parameters(), lr=FAR["lr"], eps=FAR["eps"])
    optimizer.step()
    with torch.no_grad():
        log_ratio = (plain_log_probs(model, batch) - old)[kept].tolist()
    ratios, clipped, k3 = [], 0, 0.0
    for difference, advantage in zip(log_ratio, advantages[kept].tolist(), strict=True):
        ratios.append(math.exp(difference))
        clipped += ratios[-1] > 1.2 if advantage > 0 else ratios[-1] < 0.8 and advantage < 0
        k3 += ratios[-1] - 1 - difference
    (row,) = read_metrics(directory.metrics)
    assert row["actor/steps"] == 2 and 0.05 < clipped / len(ratios) < 0.95
    assert row["actor/clip_fraction"] == pytest.approx(clipped / len(ratios) / 2), "the first step clips nothing"
    assert row["actor/approx_kl"] == pytest.approx(k3 / len(ratios) / 2, rel=1e-3)
    assert row["actor/ratio"] == pytest.approx((1 + sum(ratios) / len(ratios)) / 2, rel=1e-3)


def rounds_of(store: RolloutStore) -> list[Rollouts]:
    """Row sets that the rounds of dynamic sampling left, in their order; the last may be empty."""
    stages = [stage for name, stage in store.stages(0).items() if name.startswith("actor.generate_round")]
    return [store.read(0, row_set=stage.row_set) for stage in stages if stage.num_rows]


def test_counts_of_dynamic_sampling_are_those_of_what_was_drawn(finished: dict[str, RunSummary]) -> None:
    """Two ranks, and a reward model on a rank of its own: both draw and keep the same; by hand, from all the rounds."""
    together, apart = (RunDirectory.open(finished[name].run_dir) for name in PLACES)
    check_config(apart.config())
    rounds = rounds_of(RolloutStore(apart.rollouts))
    drawn = [str(p) for part in rounds for p in part["prompt_text"][::2]]
    good = [name for name in drawn if name.startswith("good")]
    sizes = [part.num_rows // 2 for part in rounds]
    assert sizes[0] == 4 and len(set(drawn)) == len(drawn) and 1 < len(rounds) <= 3
    assert all(size == 4 - sum(n.startswith("good") for n in drawn[: sum(sizes[:k])]) for k, size in enumerate(sizes))
    failed = sum(any(v in str(text) for v in "aeiou") for part in rounds for text in part["text"])
    batches = [RolloutStore(directory.rollouts).read(0) for directory in (together, apart)]
    for directory, batch in zip((together, apart), batches, strict=True):
        (row,) = read_metrics(directory.metrics)
        assert row["dynamic_sampling/rounds"] == len(rounds)
        assert row["dynamic_sampling/dropped_groups"] == len(drawn) - len(good) > 0
        assert row["dynamic_sampling/missing_groups"] == 4 - len(good)
        assert row["reward_errors"] == row["reward_errors/fails_on_vowels"] == failed > 0
        assert row["reward_mean"] == pytest.approx(float(batch["reward"].mean()))
        assert batch["prompt_text"].tolist() == [name for name in good for _ in range(2)]
        assert batch["group"].tolist() == [g for g in range(len(good)) for _ in range(2)]
    for name in ("token_ids", "policy_version", "prompt_id", "sample", "text", "reward/by_name"):
        assert np.array_equal(batches[0][name], batches[1][name]), name
    for name in ("reward", "reward/model", "rollout_log_probs", "advantages"):
        np.testing.assert_allclose(batches[0][name], batches[1][name], atol=1e-4)


def test_a_gap_above_the_alarm_is_in_the_log(finished: dict[str, RunSummary]) -> None:
    directory = RunDirectory.open(finished["dapo"].run_dir)
    text = "".join(path.read_text(encoding="utf-8") for path in directory.logs.glob("*.log"))
    assert "iteration 0: the engine's log-probabilities differ" in text and "rollout.gap_alarm 1e-12" in text


def test_dpo_starts_at_its_reference_and_is_evaluated_on_held_out_pairs(finished: dict[str, RunSummary]) -> None:
    (row,) = read_metrics(RunDirectory.open(finished["dpo"].run_dir).metrics)
    assert row["actor/loss"] == pytest.approx(math.log(2), abs=1e-4), "no step has been made: both log-ratios are 0"
    assert row["actor/chosen_reward"] == pytest.approx(0, abs=1e-4)
    assert row["eval/pairs"] == 3 and row["eval/accuracy"] == 1.0 and row["eval/margin"] > 0


def test_the_cost_model_and_sft_are_evaluated(finished: dict[str, RunSummary]) -> None:
    (row,) = read_metrics(RunDirectory.open(finished["cost_model"].run_dir).metrics)
    assert row["eval/pairs"] == 3 and 0 <= row["eval/sign_accuracy"] <= 1 and 0 <= row["cost/sign_accuracy"] <= 1
    (row,) = read_metrics(RunDirectory.open(finished["sft"].run_dir).metrics)
    assert row["eval/tokens"] == 3 * len("yes#") and row["eval/perplexity"] == pytest.approx(math.exp(row["eval/nll"]))
