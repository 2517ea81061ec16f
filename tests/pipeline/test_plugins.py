"""A user's module is imported by the trace, and what it registers is found by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.checks import config_problems
from configs.schema import RunConfig
from pipeline.advantages import ESTIMATORS
from pipeline.algorithms import ALGORITHMS
from pipeline.calls import CALLS
from pipeline.registry import UnknownName
from pipeline.trace import trace

SOURCE = """
from pipeline.advantages import Estimate, register_estimator
from pipeline.algorithms import ALGORITHMS
from pipeline.calls import ModelCall, register_call

register_call(ModelCall(role="actor", method="count_{n}", kind="column", protocol="DP_PROTO",
                        reads=("token_ids",), writes=("count",)))


@register_estimator("estimator_{n}")
def estimator(tokens, config):
    return Estimate(advantages=tokens.rewards, returns=tokens.rewards)


@ALGORITHMS.register("algorithm_{n}")
async def algorithm(models, prompts):
    rollouts = await models.actor.generate_sequences(prompts)
    await models.call("actor.count_{n}", rollouts)
    return rollouts
"""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone after it."""
    for registry in (ALGORITHMS, ESTIMATORS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    before = dict(CALLS)
    yield
    CALLS.clear()
    CALLS.update(before)


def plugin(folder: Path, number: int) -> str:
    path = folder / f"plugin_{number}.py"
    path.write_text(SOURCE.replace("{n}", str(number)))
    return str(path)


def test_a_plugin_registers_an_algorithm_its_call_and_an_estimator(tmp_path: Path) -> None:
    config = RunConfig(algorithm="algorithm_1", plugins=(plugin(tmp_path, 1),))
    calls = trace(config)
    assert [call.stage for call in calls] == ["actor.generate_sequences", "actor.count_1"]
    assert calls[1].writes == ("count",)
    assert "estimator_1" in ESTIMATORS.names()
    assert len(trace(config)) == 2, "a second trace in the process imports nothing anew"


def test_the_file_of_an_algorithm_named_by_path_is_a_plugin(tmp_path: Path) -> None:
    calls = trace(RunConfig(algorithm=f"{plugin(tmp_path, 2)}:algorithm"))
    assert calls[-1].stage == "actor.count_2" and "actor.count_2" in CALLS


def test_registered_names_are_known_to_the_checks_without_an_import(tmp_path: Path) -> None:
    path = plugin(tmp_path, 3)
    config = RunConfig.model_validate(
        {"algorithm": "algorithm_3", "plugins": [path], "advantage": {"estimator": "estimator_3"}}
    )
    assert not [line for line in config_problems(config) if "there is no" in line]
    assert "actor.count_3" not in CALLS
    unknown = config.model_copy(update={"plugins": ()})
    assert any("there is no algorithm 'algorithm_3'" in line for line in config_problems(unknown))


def test_a_plugin_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere.py")
    (problem,) = [p for p in config_problems(RunConfig(plugins=(missing,))) if p.startswith("plugins.0")]
    assert "No such file" in problem
    assert any("no module that can be found" in p for p in config_problems(RunConfig(plugins=("not_there.at_all",))))
    with pytest.raises(UnknownName, match="plugin.*no file"):
        trace(RunConfig(plugins=(missing,)))
