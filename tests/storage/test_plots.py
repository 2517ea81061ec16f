"""Pictures of a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from matplotlib.image import imread

from storage.errors import StorageError
from storage.metrics import MetricsLog
from storage.plots import plot_run, text_plot


def test_a_run_becomes_a_png_with_a_panel_per_metric(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for iteration in range(5):
        log.append(iteration, {"reward_mean": iteration / 5, "seconds": 1.0})
    one = imread(plot_run(tmp_path)).shape
    for iteration in range(5, 9):
        log.append(iteration, {"reward_mean": math.nan, "kl": 0.1, "response_length_mean": 12})
    assert plot_run(tmp_path) == tmp_path / "plots" / "metrics.png"
    assert imread(tmp_path / "plots" / "metrics.png").shape[0] == 3 * one[0]


def test_nothing_to_plot_is_said(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "metrics.jsonl").append(0, {"seconds": 1.0})
    with pytest.raises(StorageError, match="has nothing to plot"):
        plot_run(tmp_path)


def test_a_rising_series_rises() -> None:
    assert text_plot(list(range(8)), width=8, height=1) == "0..7 ┤▁▂▃▄▅▆▇█"
    assert text_plot(list(range(16)), width=16, height=2, label="reward") == (
        "reward\n15 ┤        ▁▂▃▄▅▆▇█\n 0 ┤▁▂▃▄▅▆▇█████████"
    )


def test_gaps_and_constants_are_drawn() -> None:
    assert text_plot([1.0, None, math.nan, 2.0], width=4, height=1) == "1..2 ┤▁  █"
    assert text_plot([3.0, 3.0], width=4, height=1) == "3..3 ┤▄▄"
    assert text_plot([], label="kl") == "kl: no values"
    assert text_plot([None], label="kl") == "kl: no values"


@pytest.mark.parametrize("length", [1, 2, 59, 60, 61, 1000])
def test_a_chart_keeps_its_size(length: int) -> None:
    lines = text_plot([math.sin(i / 9) for i in range(length)], width=60, height=4).split("\n")
    assert len(lines) == 4
    assert max(len(line.split("┤")[1]) for line in lines) == min(length, 60)
