"""Tokens coloured by a column: green above zero, red below, the stronger the further away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from configs.errors import printable
from flows.commands.tables import number

if TYPE_CHECKING:
    from rich.text import Text

ABOVE, BELOW = (46, 160, 67), (218, 54, 51)
WHITE, BLACK = "#ffffff", "#1f1f1f"


def coloured(pieces: Sequence[str], values: Sequence[float], *, scale: float) -> Text:
    """The pieces as one text with a background for each; a value of ±scale has the full colour."""
    from rich.text import Text

    text = Text()
    for piece, value in zip(pieces, values, strict=True):
        text.append(printable(piece), style=style_of(value, scale=scale))
    return text


def style_of(value: float, *, scale: float) -> str:
    """A rich style; none for zero and for what is not a finite number."""
    if not np.isfinite(value) or value == 0 or scale <= 0:
        return ""
    strength = min(abs(float(value)) / scale, 1.0)
    full = ABOVE if value > 0 else BELOW
    red, green, blue = (round(255 + (part - 255) * strength) for part in full)
    return f"{WHITE if strength > 0.6 else BLACK} on #{red:02x}{green:02x}{blue:02x}"


def scale_of(values: Sequence[float]) -> float:
    """The 98th percentile of the magnitudes: an outlier does not bleach the rest."""
    finite = np.abs(np.asarray(values, np.float64))
    finite = finite[np.isfinite(finite)]
    return float(np.quantile(finite, 0.98)) or float(finite.max()) if len(finite) else 0.0


def legend(column: str, scale: float) -> Text:
    """`advantages: -0.8 … 0 … 0.8`, in the colours."""
    from rich.text import Text

    text = Text(f"{column}: ")
    for value in (-scale, -scale / 2, 0.0, scale / 2, scale):
        text.append(f" {number(value)} ", style=style_of(value, scale=scale))
    return text
