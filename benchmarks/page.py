"""Tables that commands write into a page, between the lines `<!-- NAME -->` and `<!-- end of NAME -->`."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def write_into(page: Path, name: str, text: str) -> None:
    """Replace what stands there. Raises ValueError where the page has no such place."""
    page.write_text(replaced(page.read_text(encoding="utf-8"), name, text), encoding="utf-8")


def replaced(page: str, name: str, text: str) -> str:
    """The page with another text in that place."""
    first, last = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = page.partition(first)
    _, found, after = rest.partition(last)
    if not found:
        raise ValueError(f"no place for the table: the page needs the lines {first.strip()} and {last.strip()}")
    return f"{before}{first}\n{text}\n\n{last}{after}"


def machine() -> str:
    """What a table says of where it was made."""
    return f"{os.cpu_count()} cores ({platform.machine()}), load average {os.getloadavg()[0]:.1f} at the end"
