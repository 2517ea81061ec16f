"""Held-out data sets in a run and by the command, and groups that a reward function dropped."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.algorithms import with_algorithm_defaults
from configs.checks import check_config
from configs.errors import UserError
from configs.schema import RunConfig
from flows.cli import main
from flows.run import RunSummary, session
from pipeline.evaluation import estimate, majority_at_n, pass_at_k
from storage.evaluations import samples_file
from storage.metrics import read_metrics
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from tests.flows.tiny_runs import write_inputs
from workers.envelope import RankError

EXAMPLES = "tests.workers.reward_examples"
REFUSED = "hello"


def grpo_config(folder: Path, inputs: dict[str, str]) -> RunConfig:
    held_out = folder / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": p, "answer": p}) + "\n" for p in ("x", "y z", REFUSED)))
    refuses = {"path": f"{EXAMPLES}:refuses", "on_error": "drop_group", "options": {"this": REFUSED}}
    tree: dict[str, Any] = {
        "name": "dropping",
        "algorithm": "grpo",
        "seed": 7,
        "actor": {"path": inputs["actor"], "optimizer": {"lr": 1e-3}},
        "kl": {"placement": "none"},
        "training": {"num_iterations": 2, "num_mini_batches": 2},
        "checkpoint": {"every": 1, "keep_last": 5},
        "resources": {"num_ranks": 2, "device": "cpu"},
        "rewards": {"functions": [refuses, {"path": f"{EXAMPLES}:short", "weight": 0.5}]},
        "rollout": {"num_samples": 2, "max_new_tokens": 8},
        "data": {"train": {"path": inputs["prompts"]}, "validation": {"path": inputs["prompts"]}, "batch_size": 4},
        "evaluation": {
            "every": 2,
            "num_samples": 4,
            "ks": [2],
            "temperature": 1.0,
            "score": "short",
            "batch_size": 2,
            "datasets": {"other": {"path": str(held_out)}},
        },
    }
    return RunConfig.model_validate(with_algorithm_defaults(tree))


APART = {"pools": {"policy": {"ranks": 1}, "judge": {"ranks": 1}}, "placement": {"actor": "policy", "reward": "judge"}}


def evaluation_only(trained: RunConfig, name: str, reward: str, resources: dict[str, Any]) -> RunConfig:
    """The same data sets, greedy, with a reward model too."""
    tree = trained.model_dump(exclude_unset=True)
    tree |= {"name": name, "algorithm": "evaluate", "reward": {"path": reward}, "training": {"num_iterations": 1}}
    tree["resources"] |= resources
    greedy = {"every": None, "temperature": 0.0, "score": None, "num_samples": 2, "ks": []}
    return RunConfig.model_validate({**tree, "evaluation": {**tree["evaluation"], **greedy}})


def broken_model(config: RunConfig, folder: Path) -> RunConfig:
    """The same, of which the weights do not fit the sizes: only loading them shows it."""
    model = shutil.copytree(str(config.actor.path), folder / "broken")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "hidden_size": 2 * settings["hidden_size"]}))
    return config.model_copy(update={"name": "broken", "actor": config.actor.model_copy(update={"path": str(model)})})


def failing_reward(config: RunConfig, folder: Path) -> RunConfig:
    (folder / "own.py").write_text("def fails(prompt, response, answer): raise ValueError")
    tree = config.model_dump(exclude_unset=True) | {"name": "failing", "evaluation": {}}
    return RunConfig.model_validate({**tree, "rewards": {"functions": [{"path": f"{folder}/own.py:fails"}]}})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, prefect_server: object) -> dict[str, RunSummary]:
    """A run, and two evaluations: with the reward model beside the actor, and in a pool of its own."""
    folder = tmp_path_factory.mktemp("runs")
    inputs = write_inputs(folder)
    config = grpo_config(folder, inputs)
    others = [
        evaluation_only(config, name, inputs["reward"], resources)
        for name, resources in (("together", {}), ("apart", APART))
    ]

    async def run() -> dict[str, RunSummary]:
        async with session(config, parent=folder, num_workers=2, quiet=True) as open_session:
            with pytest.raises(RankError, match="reward function 'fails' failed") as failed:
                await open_session.run(failing_reward(config, folder))
            on, log = failed.value.__notes__
            assert on.startswith("go on with: ") and f"resume {folder}/failing-" in on and log.startswith("log: ")
            done = {each.name: await open_session.run(each) for each in (config, *others)}
            with pytest.raises(UserError, match="broken.* cannot be loaded") as raised:
                await open_session.run(broken_model(config, folder))
            assert not hasattr(raised.value, "__notes__"), "there is no log to look into"
            return done

    return asyncio.run(run())


@pytest.fixture(scope="module")
def finished(runs: dict[str, RunSummary]) -> RunSummary:
    return runs["dropping"]


def samples(run_dir: Path, step: int, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in samples_file(run_dir, step, name).read_text().splitlines()]


def test_a_dropped_group_leaves_the_update_and_stays_stored(finished: RunSummary) -> None:
    directory = RunDirectory.open(finished.run_dir)
    store, rows = RolloutStore(directory.rollouts), read_metrics(directory.metrics)
    dropped_groups = 0
    for iteration, metrics in enumerate(rows):
        batch = store.read(iteration)
        refused = batch["prompt_text"] == REFUSED
        assert np.array_equal(batch["reward_dropped"].astype(bool), refused)
        dropped_groups += refused.any()
        assert metrics["reward_errors"] == metrics["reward_errors/refuses"] == refused.sum()
        assert metrics["reward_dropped_samples"] == refused.sum()
        assert not np.repeat(refused, batch.lengths)[batch["advantages"] != 0].any()
        assert metrics["actor/tokens"] == batch["response_length"][~refused].sum()
        assert metrics["reward_mean"] == pytest.approx(batch["reward"][~refused].mean())
    assert dropped_groups == 1, "the prompt is in the data once"


def test_metrics_of_every_data_set_are_those_of_its_stored_samples(finished: RunSummary) -> None:
    directory = RunDirectory.open(finished.run_dir)
    rows = read_metrics(directory.metrics)
    for row, step in ((rows[0], 0), (rows[1], 2)):
        for name, prefix, prompts in (("validation", "eval/", 6), ("other", "eval/other/", 3)):
            stored = samples(directory.path, step, name)
            assert [(s["prompt_id"], s["sample"]) for s in stored] == [(p, n) for p in range(prompts) for n in range(4)]
            scores = np.array([s["score"] for s in stored]).reshape(prompts, 4)
            answers = [[s["extracted"] for s in stored[p * 4 : p * 4 + 4]] for p in range(prompts)]
            found = {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}
            assert found["mean@4"] == pytest.approx(scores.mean())
            assert found["pass@2"] == pytest.approx(pass_at_k(scores == 1, 2).mean())
            assert found["maj@4"] == pytest.approx(majority_at_n(scores, answers).mean())
            assert found["pass@4_low"] == pytest.approx(estimate(scores.max(axis=1)).low)
            assert found["reward_errors"] == 4, "a refused prompt counts as 0"
            assert scores.ravel().tolist() == [float(len(s["response"]) < 12) for s in stored]
    said = {e["step"]: e["datasets"] for e in finished.evaluations}
    assert list(said) == [rows[0]["eval/step"], rows[1]["eval/step"]] == [0, 2]
    assert said[2]["other"]["mean@4"] == rows[1]["eval/other/mean@4"]
    log = (directory.logs / "controller.log").read_text()
    order = ["evaluation before training: ", "iteration 0 (1 of 2", "iteration 1 (2 of 2", "evaluation after 2 it"]
    places = [log.index(text) for text in order]
    assert places == sorted(places)
    assert samples(directory.path, 0, "other")[0]["answer"] is None, "no answer column is configured"


def test_a_run_whose_model_cannot_be_loaded_leaves_no_directory(finished: RunSummary) -> None:
    parent = Path(finished.run_dir).parent
    assert not list(parent.glob("broken-*"))
    assert RunDirectory.resolve("latest", parent).path == Path(finished.run_dir), "evaluations aside"


def test_a_reward_model_in_another_pool_gives_the_same_evaluation(runs: dict[str, RunSummary]) -> None:
    together, apart = (RunDirectory.open(runs[name].run_dir) for name in ("together", "apart"))
    check_config(apart.config())
    for name, prompts in (("validation", 6), ("other", 3)):
        first, second = samples(together.path, 0, name), samples(apart.path, 0, name)
        assert len(first) == 2 * prompts and len({sample["parts"]["model"] for sample in first}) > 1
        for a, b in zip(first, second, strict=True):
            numbers = [{**x.pop("parts"), "score": x.pop("score"), "reward": x.pop("reward")} for x in (a, b)]
            assert a == b and numbers[0] == pytest.approx(numbers[1], abs=1e-5)
    (a,), (b,) = read_metrics(together.metrics), read_metrics(apart.metrics)
    found = {key: value for key, value in a.items() if key.startswith("eval/")}
    assert found == pytest.approx({key: value for key, value in b.items() if key.startswith("eval/")}, abs=1e-5)
    assert found["eval/other/reward_errors"] == 2 and len(found) > 30
    assert not [key for key in b if key.startswith("held_out")], "the stages between have no metrics of their own"


def test_the_command_evaluates_a_checkpoint(
    finished: RunSummary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory.open(finished.run_dir)
    held_out = directory.config().evaluation.datasets["other"].path
    arguments = ["--checkpoint", f"{directory.path}@1", "--dataset", f"mine={held_out}", "--output", str(tmp_path)]
    changes = ("resources.num_ranks=1", "evaluation.num_samples=1", "evaluation.ks=[]")
    overrides = [word for change in changes for word in ("--set", change)]
    assert main(["evaluate", str(directory.config_yaml), *arguments, *overrides, "--json"]) == 0
    printed = capsys.readouterr()
    assert "iteration" not in printed.err, "nothing is trained"
    document = json.loads(printed.out)
    assert document["status"] == "completed" and document["model"].endswith("@1/actor")
    (results,) = document["datasets"].values()
    stored = samples(Path(document["run_dir"]), 0, "mine")
    assert len(stored) == results["prompts"] == 3 and results["reward_errors"] == 1
    mean = np.mean([s["score"] for s in stored])
    assert {results["estimates"][name]["value"] for name in ("mean@1", "maj@1", "pass@1", "best@1")} == {mean}
    assert results["estimates"]["mean@1"]["low"] <= mean <= results["estimates"]["mean@1"]["high"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "RUN@7"], "has no checkpoint of step 7; there are 1, 2"),
        (["--checkpoint", "no-such-run"], "no run 'no-such-run'"),
        (["--dataset", "mine"], "--dataset mine: write NAME=PATH"),
        (["--dataset", "mine=nowhere.jsonl"], "evaluation.datasets.mine.path: nowhere.jsonl: no such file"),
        (["--set", "evaluation.score=shrt"], "evaluation.score: there is no part 'shrt' of the reward"),
        (["--set", "evaluation.ks=[9]"], "evaluation.ks: 9 is more than evaluation.num_samples 4"),
    ],
)
def test_a_mistake_is_one_line(
    finished: RunSummary, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory.open(finished.run_dir)
    given = [text.replace("RUN", str(directory.path)) for text in arguments]
    assert main(["evaluate", str(directory.config_yaml), *given]) == 2
    assert message in capsys.readouterr().err
