"""The run that a command is asked about."""

from __future__ import annotations

import sys

from storage.locations import Location
from storage.run_directory import RunDirectory
from storage.run_needs import Need, choose


def named_run(name_or_path: str, runs: Location | str, need: Need) -> RunDirectory:
    """The newest run of this name that has what the command needs; stderr says where a newer one has not."""
    choice = choose(name_or_path, runs, need)
    if choice.passed_over:
        print(f"hybridflow: {name_or_path}: {choice.sentence(need)}", file=sys.stderr)
    return choice.run
