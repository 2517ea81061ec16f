"""`checkpoint:RUN[@STEP][/ROLE]`: how a configuration names a model of an earlier run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from configs.schema import ROLES

CHECKPOINT = "checkpoint:"


@dataclass(frozen=True, kw_only=True)
class CheckpointPath:
    """run: a run directory or a run's name. step: finished iterations, None: the newest checkpoint. role: None: the
    likely one."""

    run: str
    step: int | None = None
    role: str | None = None

    def __str__(self) -> str:
        step = "" if self.step is None else f"@{self.step}"
        return f"{CHECKPOINT}{self.run}{step}" + ("" if self.role is None else f"/{self.role}")


def parse_checkpoint(path: str) -> CheckpointPath:
    """The parts of a path that begins with `checkpoint:`."""
    name, role = path.removeprefix(CHECKPOINT), None
    above, _, last = name.rpartition("/")
    if above and last in ROLES:
        name, role = above, last
    match = re.fullmatch(r"(.+)@(\d+)", name)
    if match is None:
        return CheckpointPath(run=name, role=role)
    return CheckpointPath(run=match[1], step=int(match[2]), role=role)
