from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from flows.live_view import LiveView, headline

METRICS = {
    "reward_mean": 0.51234,
    "kl": 0.01,
    "response_length_mean": 24.0,
    "tokens_per_second": 18300.4,
    "time/iteration": 2.5,
    "text": "not a number",
}


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None, legacy_windows=False)


def screen(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_the_headline_names_what_is_there() -> None:
    assert headline(METRICS) == "reward 0.512  KL 0.01  length 24  tokens/s 18,300  s 2.5"
    safe = {"cost_multiplier": 0.5, "cost_mean": -1.25, "reward_mean": 2.0, "tokens_per_second": 999.7}
    assert headline(safe) == "reward 2  cost -1.25  multiplier 0.5  tokens/s 1,000"
    pairs = {"actor.update_actor/margin": 0.031, "loss": 0.68, "accuracy": 0.5}
    assert headline(pairs) == "loss 0.68  accuracy 0.5  margin 0.031"
    assert headline({"reward.update_reward/accuracy": 0.75}) == "accuracy 0.75"
    assert headline({"kl": float("nan")}) == "KL nan"
    assert headline({}) == ""


def test_without_a_terminal_each_iteration_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView(3) as view:
        view.stage_started("actor.generate_sequences[0]")
        view.stage_finished("actor.generate_sequences[0]", 1.5)
        view.iteration_finished(0, METRICS)
        view.note("[bold]a note[/bold]")
        view.iteration_finished(1, {})
        view.iteration_finished(2, {"kl": 0.5, "replayed": 1})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "iteration 0 (1 of 3 done)  reward 0.512  KL 0.01  length 24  tokens/s 18,300  s 2.5",
        "[bold]a note[/bold]",
        "iteration 1 (2 of 3 done)",
        "iteration 2 (3 of 3 done, replayed)  KL 0.5",
    ]


def test_quiet_in_a_terminal_is_the_same_lines() -> None:
    console = terminal()
    with LiveView(2, quiet=True, console=console) as view:
        view.stage_started("stage")
        view.iteration_finished(0, {"kl": 1.0})
    assert screen(console) == "iteration 0 (1 of 2 done)  KL 1\n"


def test_in_a_terminal_running_stages_and_progress_are_shown() -> None:
    console = terminal()
    with LiveView(4, console=console) as view:
        view.stage_started("critic.compute_values[0]")
        view.stage_started("reward.compute_reward[0]")
        view.stage_finished("reward.compute_reward[0]", 0.1)
        view.iteration_finished(0, METRICS)
        view._live.refresh()
        shown = screen(console)
        view.note("one [note]")
    assert "1/4" in shown and "critic.compute_values[0]  0 s" in shown
    assert "reward.compute_reward" not in shown.splitlines()[-1]
    assert "reward 0.512" in shown and "one [note]" in screen(console)
    assert console.file.getvalue().endswith("\x1b[?25h"), "the cursor comes back"  # type: ignore[attr-defined]
