"""The report's page: one file that loads nothing.

Data lie in a script element of type application/json with every `<` escaped, so that no text of a model can
end it; the page's own script writes them through textContent only, and the content security policy admits
that script alone, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from storage.atomic import atomic_write, make_folder, writing
from storage.locations import Location

ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def write_page(path: Location, data: Mapping[str, Any]) -> int:
    """Write the page; its size in bytes. Raises StorageError when the disk refuses."""
    page = render(data).encode("utf-8", errors="replace")
    with writing(path):
        make_folder(path.absolute().parent)
        atomic_write(path, page)
    return len(page)


def render(data: Mapping[str, Any]) -> str:
    """The page as text."""
    script = _asset("report.js")
    parts = {
        "style": _asset("report.css"),
        "script": script,
        "script_hash": f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        "data": embedded(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("report.html"))


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda match: ESCAPED[match[0]], text)


def _asset(name: str) -> str:
    return (files("storage") / "report_assets" / name).read_text(encoding="utf-8")
