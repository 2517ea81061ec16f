"""Replay: any stage of a run again from what is stored; the same bit for bit, where not, or what if.

The run is read only. What is computed goes to a scratch directory, which is removed unless the replay fails.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed import Client

from configs.errors import UserError
from configs.schema import RunConfig
from flows.changes import changed, stated
from flows.live_view import LiveView
from flows.logs import controller_log
from flows.preflight import check
from flows.replay_plan import (
    ReplayPlan,
    call_of,
    config_when,
    executions_met,
    find_stage,
    replay_plan,
    stored_stages,
)
from flows.replay_result import Replay
from flows.replayer import Replayer
from flows.run import ranks_needed
from flows.signals import StopRequest
from pipeline.trace import trace_async
from storage.run_directory import RunDirectory
from workers.attach import SHARED_SCRATCH, check_workers
from workers.cluster import dask_client


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be replayed. before: the settings that the stage had; config: those that it gets now."""

    run: RunDirectory
    plan: ReplayPlan
    before: RunConfig
    config: RunConfig
    overrides: tuple[str, ...]

    @property
    def num_workers(self) -> int:
        """Of any leg, and of any stage whose columns may have to be computed again to see whether they were altered."""
        configs = (self.before, self.config, *self.plan.settings.values())
        others = () if self.overrides else executions_met(self.run, self.plan)
        return max(*map(ranks_needed, configs), *(execution.num_ranks for execution in others))


async def question(run: RunDirectory, *, iteration: int, stage: str, overrides: Sequence[str] = ()) -> Question:
    """Everything that can be said without a process. Raises UserError."""
    record = find_stage(stored_stages(run, iteration), stage, iteration)
    before = config_when(run, record)
    file = str(run.config_json)
    config = changed(before, overrides, file=file) if overrides else before
    check(config, source=file, stated=stated(before, overrides, file=file))
    calls = await trace_async(before)  # it registers the calls of plugins
    if call_of(record).generates and not overrides:
        _check_reproducible(before, stage)
    plan = replay_plan(run, iteration, record, before, calls)
    return Question(run=run, plan=plan, before=before, config=config, overrides=tuple(overrides))


def _check_reproducible(config: RunConfig, stage: str) -> None:
    if config.rollout.engine == "sglang" and (not config.deterministic or config.resources.device == "cpu"):
        raise UserError(
            f"--stage {stage}: SGLang generates the same again only on a GPU under `deterministic: true`, which this "
            "run was not; replay another stage, or ask what if with --set"
        )


async def answer(asked: Question, client: Client, folder: Path, *, view: LiveView, stop: StopRequest) -> Replay:
    """Compute and compare. folder: empty, for scratch directories. Raises UserError, RankError, StopRequested."""
    replayer = Replayer(run=asked.run, client=client, folder=folder, view=view, stop=stop)
    if asked.overrides:
        return await replayer.what_if(asked.plan, asked.before, asked.config, asked.overrides)
    return await replayer.again(asked.plan)


def replay(
    run: RunDirectory, *, iteration: int, stage: str, overrides: Sequence[str] = (), quiet: bool = False
) -> Replay:
    """Run a stored stage again; nothing in the run directory changes. Raises UserError before anything is started."""

    async def go(folder: Path) -> Replay:
        asked = await question(run, iteration=iteration, stage=stage, overrides=overrides)
        with StopRequest() as stop, LiveView(1, quiet=quiet) as view:
            stop.note = view.note
            async with dask_client(asked.config, num_workers=asked.num_workers) as client:
                if asked.config.cluster.scheduler is not None:
                    await check_workers(client, asked.config, folder, asked=SHARED_SCRATCH)
                return await answer(asked, client, folder, view=view, stop=stop)

    with run.kept_still():
        folder = Path(tempfile.mkdtemp(prefix="hybridflow-replay-"))
        try:
            with controller_log(folder) as log:
                found = asyncio.run(go(folder))
        except UserError:
            shutil.rmtree(folder)
            raise
        except Exception as error:
            error.add_note(f"log: {log}")
            raise
        shutil.rmtree(folder)
        return found
