"""The commands that a run which failed ends its line with."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from configs.engine_checks import torch_engine_overrides
from configs.schema import RunConfig
from flows.hints import typed_command
from storage.locations import Location
from workers.envelope import RankError


def ways_on(error: Exception, config: RunConfig, run_dir: Location) -> Iterator[str]:
    """Those that the error itself does not name. A rank's may name a log in the run's folder, which is no way on."""
    resume = f"{typed_command()} resume {run_dir}"
    named = f"resume {run_dir}" if isinstance(error, RankError) else str(run_dir)
    if named not in str(error):
        yield f"go on with: {resume}"
    if isinstance(error, RankError) and error.error_class == "start":
        overrides = torch_engine_overrides(config)
        if overrides:
            settings = " ".join(f"--set {shlex.quote(override)}" for override in overrides)
            yield f"or with the Torch engine: {resume} {settings}"
