"""Tables and numbers for terminals."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from configs.errors import printable

if TYPE_CHECKING:
    from rich.console import Console


def print_table(
    console: Console,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    num_right: int = 0,
    left: Container[str] = (),
) -> None:
    """A table whose first `num_right` columns, but for those named in `left`, are aligned to the right; text is printed
    as it is."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index < num_right and name not in left else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def number(value: Any) -> str:
    """A number in four digits, or all those before the point; empty for None."""
    if value is None:
        return ""
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 9999.5 <= abs(value) < 1e9 else f"{value:.4g}"


def counted(count: int, noun: str) -> str:
    """`1 iteration`, `2 iterations`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def size(num_bytes: int) -> str:
    """`850 bytes`, `12.3 kB`, `4.0 MB`."""
    for unit, factor in (("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return counted(num_bytes, "byte")


def shorten(text: str, *, max_characters: int = 40) -> str:
    """One line, cut to a readable length."""
    line = " ".join(printable(text).split())
    return line if len(line) <= max_characters else f"{line[: max_characters - 1]}…"
