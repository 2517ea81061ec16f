"""What a command writes where it is told to, never lands on the files that a run is made of."""

from __future__ import annotations

import os
from pathlib import Path

from configs.errors import UserError
from configs.paths import is_there, user_path

FOR_OUTPUTS = ("exports", "plots")
"""Folders of a run directory whose files a resume, a replay or a report does not read."""


def refuse_own_files(output: Path, place: str) -> None:
    """Raises UserError where `output` lies in a run directory, but for FOR_OUTPUTS and a page beside them.

    place: what the message begins with, as `--output`.
    """
    try:
        path = Path(os.path.realpath(user_path(output)))
    except ValueError:  # a NUL character: no file is written there
        return
    for folder in (path, *path.parents):
        if not (is_there(folder / "config.json") and is_there(folder / "config.yaml")):
            continue
        inside = path.relative_to(folder)
        if inside.parts and (inside.parts[0] in FOR_OUTPUTS or (len(inside.parts) == 1 and inside.suffix == ".html")):
            continue
        allowed = " or ".join(f"{name}/" for name in FOR_OUTPUTS)
        raise UserError(
            f"{place}{output}: lies in the run directory {folder}, among what the run is made of; name a file outside, "
            f"or in its {allowed}"
        )
