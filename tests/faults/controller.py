"""A run in a process of its own, on ranks that may kill it.

python -m tests.faults.controller run CONFIG PARENT
python -m tests.faults.controller resume RUN
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

from configs.loader import load_config
from flows.run import session
from storage.run_directory import RunDirectory
from tests.faults.ranks import FaultyRank


async def run(config_file: str, parent: str) -> None:
    config = load_config(config_file, ())
    async with session(config, parent=Path(parent), num_workers=2, quiet=True) as own:
        await dataclasses.replace(own, actor_class=FaultyRank).run(config)


async def resume(run_dir: str) -> None:
    directory = RunDirectory.open(run_dir)
    config = directory.config()
    async with session(config, parent=directory.path.parent, num_workers=2, quiet=True) as own:
        await dataclasses.replace(own, actor_class=FaultyRank).resume(directory, config)
    assert not {"torch", "transformers"} & set(sys.modules), "a controller starts seconds later with these"


if __name__ == "__main__":
    asyncio.run({"run": run, "resume": resume}[sys.argv[1]](*sys.argv[2:]))
