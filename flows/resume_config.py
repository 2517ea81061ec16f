"""With which configuration a run goes on; imports neither torch nor Prefect."""

from __future__ import annotations

from collections.abc import Sequence

from configs.errors import UserError
from configs.schema import RunConfig
from flows.changes import changed, stated, where_it_is
from flows.hub_lookup import look_up
from flows.preflight import check
from storage.checkpoints import CheckpointStore
from storage.run_directory import RunDirectory
from storage.run_lock import refuse_running


def config_to_resume(directory: RunDirectory, overrides: Sequence[str]) -> RunConfig | None:
    """The run's configuration with these overrides, checked; None: nothing is left to do. Raises UserError."""
    before, file = where_it_is(directory), str(directory.config_json)
    config = changed(before, overrides, file=file)
    newest = CheckpointStore(directory.checkpoints).latest()
    step, asked = newest.step if newest is not None else 0, config.training.num_iterations
    if step >= asked and not overrides:
        return None
    refuse_running(directory.path)
    told = stated(before, overrides, file=file)
    check(config, source=file, stated=told)
    with told.locating(file=file):
        look_up(config, before=before)
    if step > asked and asked != before.training.num_iterations:
        raise UserError(f"--set training.num_iterations={asked}: {step} iterations are done; set more to go on")
    return None if step >= asked else config
