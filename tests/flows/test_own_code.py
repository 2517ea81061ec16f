"""A mistake in a user's own code is one line with file and line, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.schema import RunConfig
from flows.own_code import own_code_problems
from pipeline import trace_process
from pipeline.trace_process import answer

GENERATE = "    rollouts = await models.actor.generate_sequences(prompts)\n"
NO_COROUTINE = "def mine(models, prompts):\n    return prompts\n"
ENDLESS = "async def mine(models, prompts):\n    while True:\n        await models.actor.generate_sequences(prompts)\n"
STUCK = "async def mine(models, prompts):\n    while True:\n        try: x = 1\n        except Exception: pass\n"


def config(folder: Path, source: str, **tree: Any) -> RunConfig:
    (folder / "mine.py").write_text(source)
    return RunConfig.model_validate({"algorithm": f"{folder}/mine.py:mine", **tree})


def body(*lines: str) -> str:
    return "async def mine(models, prompts):\n" + GENERATE + "".join(f"    {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("source", "line", "part"),
    [
        (body("undefined_name"), 3, "NameError"),
        (body("raise ValueError('two\\nlines')"), 3, "ValueError: two lines"),
        (body("await models.actor.fly(rollouts)"), 3, "no attribute 'fly'"),
        (body("await models.call('actor.fly', rollouts)"), 3, "no call 'actor.fly'"),
        (body("import no_such_package"), 3, "no_such_package"),
        (body("raise SystemExit(3)"), 3, "SystemExit"),
        (STUCK, None, "no end after 0.3 s"),
        (ENDLESS, 3, "more than 1000 calls"),
        (NO_COROUTINE, None, "write `async def`"),
        (body("await models.critic.update_critic(rollouts)"), 3, "reads values, returns, which no call before"),
        ("1 / 0\nasync def mine(models, prompts): pass\n", 1, "ZeroDivisionError"),
    ],
)
def test_a_mistake_in_an_algorithm_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, line: int | None, part: str
) -> None:
    monkeypatch.setattr(trace_process, "TRACE_TIMEOUT_S", 0.3)
    problem = str(answer(config(tmp_path, source))["problem"])
    assert part in problem and "\n" not in problem and len(problem) < 600
    assert line is None or f"mine.py:{line}: " in problem


REWARDED = ("await models.actor.compute_log_prob(rollouts)", "await models.reward.compute_reward(rollouts)")
ADVANTAGES, UPDATE = (
    "await models.compute_advantages(rollouts{})",
    "await models.actor.update_actor(rollouts, loss={!r})",
)
REFERENCE = "await models.reference.compute_log_prob(rollouts)"


@pytest.mark.parametrize(
    ("lines", "kl", "part"),
    [
        (
            (ADVANTAGES.format(""), UPDATE.format("mine.py:own")),
            "loss",
            "mine.py:6: kl.placement: loss (kl.coef 0.001)",
        ),
        ((ADVANTAGES.format(""), UPDATE.format("clipped")), "loss", "mine.py:6: kl.placement: loss (kl.coef 0.001)"),
        ((ADVANTAGES.format(", estimator='gae'"),), "reward", "mine.py:5: kl.placement: reward (kl.coef 0.001)"),
        ((REFERENCE, ADVANTAGES.format(", estimator='gae'")), "reward", "gae reads values, which no call"),
        ((ADVANTAGES.format(", estimator='remax'"),), "none", "remax reads baseline, which no call"),
        ((UPDATE.format("clipped"),), "none", "the loss clipped reads advantages"),
        ((UPDATE.format("dpo"),), "none", "the loss dpo reads ref_log_probs"),
        ((ADVANTAGES.format(""), UPDATE.format("clipped")), "none", None),
        ((REFERENCE, ADVANTAGES.format(""), UPDATE.format("mine.py:own")), "loss", None),
        ((UPDATE.format("sft"),), "loss", None),
    ],
)
def test_what_estimator_loss_and_kl_term_read_has_to_be_written(
    tmp_path: Path, lines: tuple[str, ...], kl: str, part: str | None
) -> None:
    found = answer(config(tmp_path, body(*REWARDED, *lines), kl={"placement": kl, "coef": 0.001})).get("problem")
    assert found is None if part is None else part in str(found)
    assert part is None or not part.endswith("0.001)") or str(found).endswith("or --set kl.placement=none")


def test_an_algorithm_that_runs_says_what_it_trains(tmp_path: Path) -> None:
    good = body("await models.reward.compute_reward(rollouts)", "await models.actor.update_actor(rollouts, loss='x')")
    assert answer(config(tmp_path, good)) == {"roles": ["actor", "reward"], "trained": ["actor"]}


def test_estimators_and_losses_are_asked_for_their_arguments(tmp_path: Path) -> None:
    source = "def few(tokens): ...\ndef right(tokens, config): ...\n"
    tree: dict[str, Any] = {"algorithm": "grpo"}
    for name, expected in (("few", "too many positional"), ("right", None), ("gone", "has no 'gone'")):
        tree["advantage"] = {"estimator": f"{tmp_path}/mine.py:{name}"}
        problem = answer(config(tmp_path, source, **tree)).get("problem")
        assert problem is None if expected is None else expected in str(problem)


def test_own_code_runs_in_a_process_of_its_own_and_built_in_names_start_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    loud = "print('imported')\nimport os\nos.chdir('/')\n" + body("undefined_name")
    (problem,) = own_code_problems(config(tmp_path, loud))
    assert "mine.py:6: NameError" in problem
    assert capfd.readouterr() == ("", "") and Path.cwd() != Path("/")
    (ended,) = own_code_problems(config(tmp_path, "import os\nos._exit(3)\n"))
    assert "ended Python" in ended
    monkeypatch.setattr("flows.own_code.sys.executable", "/no/python")
    assert list(own_code_problems(RunConfig(algorithm="grpo"))) == []
