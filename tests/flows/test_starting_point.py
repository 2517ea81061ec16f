from __future__ import annotations

from pathlib import Path

from configs.loader import load_config
from configs.schema import RunConfig
from flows.recurring import evaluating, run_directory
from flows.starting_point import create_run
from storage.checkpoints import CheckpointStore
from storage.earlier_runs import prompt_digest, read_seen
from storage.run_directory import RunDirectory
from tests.configs.trees import write_good
from tests.flows.stored_run import stored_run


def run_with_actor(folder: Path) -> tuple[RunConfig, RunDirectory]:
    """A configuration, and a run of it whose newest checkpoint holds an actor."""
    run = stored_run(folder)
    store = CheckpointStore(run.checkpoints)
    (store.begin(4) / "actor").mkdir()
    store._aside(4).joinpath("actor", "x").write_bytes(b"x")
    store.commit(4, {"iteration": 4})
    config = load_config(str(write_good(folder)), [f"output={folder / 'runs'}"])
    return config, run


def test_latest_is_written_down_as_the_checkpoint_that_it_meant(tmp_path: Path) -> None:
    config, run = run_with_actor(tmp_path)
    config = config.model_copy(update={"initialize_from": "latest"})
    new = create_run(config, tmp_path / "runs").config()
    assert new.actor.path == f"checkpoint:{run.path}@4/actor"
    assert new.reference.path == config.actor.path, "the KL term's anchor does not move"
    assert new.tokenizer == (config.tokenizer or config.actor.path), "found without the earlier runs"


def test_the_first_run_starts_from_its_own_path(tmp_path: Path) -> None:
    config = load_config(str(write_good(tmp_path)), ["initialize_from=latest"])
    assert create_run(config, tmp_path / "runs").config().actor == config.actor


def test_prompts_that_were_sampled_are_kept_over_runs(tmp_path: Path) -> None:
    config, _ = run_with_actor(tmp_path)
    tree = config.model_dump(mode="json")
    config = RunConfig.model_validate({**tree, "data": {**tree["data"], "seen_prompts": "last"}})
    second = create_run(config, tmp_path / "runs")
    assert read_seen(second.path) == {prompt_digest("1+1="), prompt_digest("[bold]2+2=")}
    third = create_run(config, tmp_path / "runs")
    assert read_seen(third.path) == read_seen(second.path)


def test_a_flow_run_has_one_run_directory(tmp_path: Path) -> None:
    from uuid import UUID

    config = load_config(str(write_good(tmp_path)), [])
    first, other = UUID(int=1), UUID(int=2)
    made = run_directory(config, tmp_path, first)
    assert run_directory(config, tmp_path, first) == made
    assert run_directory(config, tmp_path, other) != made
    assert made.name == config.name


def test_the_evaluation_is_of_the_newest_checkpoint(tmp_path: Path) -> None:
    config, run = run_with_actor(tmp_path)
    wanted = evaluating(config)
    assert (wanted.algorithm, wanted.actor.path) == ("evaluate", f"checkpoint:{run.path}@4/actor")
    assert wanted.name == f"{config.name}-evaluation"


def test_a_checkpoint_of_a_name_is_that_of_the_newest_run_which_has_one_whatever_comes_later(tmp_path: Path) -> None:
    config, run = run_with_actor(tmp_path)
    RunDirectory.create(config, tmp_path / "runs")  # it failed before its first checkpoint
    reward = config.reward.model_copy(update={"path": f"checkpoint:{config.name}/actor"})
    new = create_run(config.model_copy(update={"reward": reward}), tmp_path / "runs").config()
    assert new.reward.path == f"checkpoint:{run.path}@4/actor"
