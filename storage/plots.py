"""Pictures of a run: a PNG for people, a few lines of blocks for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import pairwise
from typing import Any

from storage.atomic import atomic_write, make_folder, writing
from storage.errors import StorageError
from storage.locations import Location, location
from storage.metrics import read_metrics

BLOCKS = " ▁▂▃▄▅▆▇█"
# A panel is drawn when any of its metrics was logged.
PANELS: Mapping[str, tuple[str, ...]] = {
    "reward": ("reward_mean", "eval/reward_mean"),
    "KL to the reference, per sequence": ("kl",),
    "response tokens": ("response_length_mean",),
    "loss": ("loss", "actor/loss", "critic/loss", "reward/loss"),
    "accuracy": ("accuracy", "eval/accuracy"),
}


def series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Iterations and values of one metric, where it was logged as a number."""
    points = [(line["iteration"], line[name]) for line in lines if name in line]
    kept = [(iteration, float(value)) for iteration, value in points if isinstance(value, int | float)]
    return [iteration for iteration, _ in kept], [value for _, value in kept]


def plot_run(run_dir: Location | str) -> Location:
    """Draw reward, KL, lengths, losses and accuracy into `plots/metrics.png`; returns the file.

    Raises StorageError when the run has logged none of them, or the disk refuses.
    """
    run_dir = location(run_dir)
    lines = read_metrics(run_dir / "metrics.jsonl")
    logged = {title: [name for name in names if series(lines, name)[0]] for title, names in PANELS.items()}
    panels = {title: names for title, names in logged.items() if names}
    if not panels:
        raise StorageError(f"{run_dir / 'metrics.jsonl'} has nothing to plot: no iteration was logged yet")
    path = run_dir / "plots" / "metrics.png"
    with writing(path):
        make_folder(path.parent)
        atomic_write(path, _draw(run_dir.resolve().name, lines, panels))
    return path


def _draw(title: str, lines: Sequence[Mapping[str, Any]], panels: Mapping[str, Sequence[str]]) -> bytes:
    # Imported here: matplotlib costs half a second, and most commands draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.2 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (panel, names) in zip(axes, panels.items(), strict=True):
        for name in names:
            axis.plot(*series(lines, name), label=name, marker="." if len(lines) < 50 else "")
        axis.set_ylabel(panel)
        axis.grid(alpha=0.3)
        if len(names) > 1:
            axis.legend()
    axes[-1].set_xlabel("iteration")
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def text_plot(values: Sequence[float | None], *, width: int = 60, height: int = 6, label: str = "") -> str:
    """A chart of blocks, `height` lines of at most `width` columns, with the range at its left.

    More values than columns are averaged; values that are None or not finite are left blank.
    """
    columns = _resample(values, width)
    known = [value for value in columns if value is not None]
    if not known:
        return f"{label}: no values" if label else "no values"
    low, high = min(known), max(known)
    span = high - low
    steps = height * (len(BLOCKS) - 1)
    # The lowest value still shows one step; a constant series is half as high as the chart.
    levels = [
        0 if value is None else 1 + round((value - low) / span * (steps - 1)) if span else steps // 2
        for value in columns
    ]
    margin = {height - 1: f"{high:.4g}", 0: f"{low:.4g}"} if height > 1 else {0: f"{low:.4g}..{high:.4g}"}
    margin_width = max(len(text) for text in margin.values())
    rows = [
        f"{margin.get(row, ''):>{margin_width}} ┤" + "".join(_block(level, row) for level in levels)
        for row in reversed(range(height))
    ]
    return "\n".join(([label] if label else []) + [row.rstrip() for row in rows])


def _block(level: int, row: int) -> str:
    per_row = len(BLOCKS) - 1
    return BLOCKS[min(max(level - row * per_row, 0), per_row)]


def _resample(values: Sequence[float | None], width: int) -> list[float | None]:
    num_columns = min(len(values), width)
    edges = [index * len(values) // num_columns for index in range(num_columns + 1)] if num_columns else [0]
    return [_mean(values[start:end]) for start, end in pairwise(edges)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None
