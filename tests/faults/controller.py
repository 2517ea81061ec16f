"""A run in a process of its own, on ranks that may kill it, started as `hybridflow` starts one.

python -m tests.faults.controller run CONFIG PARENT
python -m tests.faults.controller resume RUN
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

from configs.loader import load_config
from configs.schema import RunConfig
from flows.resume_config import config_to_resume
from storage.run_directory import RunDirectory
from workers import fork_server


def run(config_file: str, parent: str) -> None:
    asyncio.run(started(load_config(config_file, ()), Path(parent), None))


def resume(run_dir: str) -> None:
    directory = RunDirectory.open(run_dir)
    config = config_to_resume(directory, ())
    assert config is not None
    asyncio.run(started(config, directory.path.parent, directory))
    assert not {"torch", "transformers"} & set(sys.modules), "a controller starts seconds later with these"


async def started(config: RunConfig, parent: Path, directory: RunDirectory | None) -> None:
    """A new run, or one that goes on."""
    fork_server.start(config)
    from flows.run import session
    from tests.faults.ranks import FaultyRank

    async with session(config, parent=parent, num_workers=2, quiet=True) as own:
        faulty = dataclasses.replace(own, actor_class=FaultyRank)
        await (faulty.run(config) if directory is None else faulty.resume(directory, config))


if __name__ == "__main__":
    {"run": run, "resume": resume}[sys.argv[1]](*sys.argv[2:])
