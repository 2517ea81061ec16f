"""One iteration's timeline as a picture: a row per rank, a block per stage, after the paper's Figure 3."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

from storage.atomic import atomic_write, make_folder, writing
from storage.locations import Location
from storage.timeline import Span

ROW_INCHES = 0.42


def plot_timeline(path: Location, spans: Sequence[Span], *, title: str) -> None:
    """Draw the spans into a PNG. Raises StorageError when the disk refuses, ValueError without any span."""
    if not spans:
        raise ValueError("no spans to draw")
    with writing(path):
        make_folder(path.absolute().parent)
        atomic_write(path, _draw(spans, title))


def _draw(spans: Sequence[Span], title: str) -> bytes:
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = {key: place for place, key in enumerate(sorted({(span.pool, span.rank) for span in spans}))}
    stages = list(dict.fromkeys(span.stage for span in spans))
    palette = colormaps["tab20"]
    colors = {stage: palette(number % palette.N) for number, stage in enumerate(stages)}
    origin, end = min(span.start for span in spans), max(span.end for span in spans)
    figure = Figure(figsize=(11, 1.6 + ROW_INCHES * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for span in spans:
        place = rows[span.pool, span.rank]
        left, width = span.start - origin, max(span.seconds, 1e-3)
        axis.barh(place, width, left=left, height=0.8, color=colors[span.stage], edgecolor="white")
        if width > 0.04 * (end - origin):
            axis.text(left + width / 2, place, f"{width:.2g}", ha="center", va="center", fontsize=7)
    axis.set_yticks(list(rows.values()), [f"{pool}: rank {rank}" for pool, rank in rows])
    axis.invert_yaxis()
    axis.set_xlim(0, (end - origin) or 1)
    axis.set_xlabel("seconds")
    axis.set_title(title)
    handles = [Patch(color=color, label=stage) for stage, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()
