"""Runs: from a configuration to a finished run directory, and on from an unfinished one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from distributed import Client

from configs.errors import UserError
from configs.overrides import shown_override
from configs.schema import RunConfig
from flows.execution import RunExecution
from flows.live_view import LiveView
from flows.logs import IN_FILE_ONLY, controller_log, without_dask_chatter
from flows.prefect_client import client_settings, configured_api_url
from flows.prefect_server import HOME, LocalPrefectServer
from flows.preflight import check
from flows.resume_config import config_to_resume
from flows.signals import StopRequest
from flows.starting_point import create_run
from flows.ways_on import ways_on
from pipeline.placement import pool_sizes
from storage.checkpoints import CheckpointStore
from storage.evaluation_results import evaluations_of, first_and_last
from storage.locations import Location, local_side, location
from storage.metrics import num_reported, read_metrics
from storage.run_directory import RunDirectory
from workers.attach import check_workers
from workers.cluster import dask_client
from workers.envelope import RankError
from workers.rank_actor import RankActor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """How a run ended. status: completed, or stopped (committed and resumable). note: for the user, if any."""

    run_dir: str
    status: str
    iterations: int
    metrics: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    """Rebuilds of the ranks on the way: cause, checkpoint, stages and iterations repeated, seconds."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """The run's first and last evaluation, whichever execution made them; none where this one made none: step, and each
    data set's estimates."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Session:
    """What several runs may share: a Prefect server and a Dask cluster. Runs go one after the other."""

    client: Client
    stop: StopRequest
    parent: Location
    quiet: bool
    actor_class: type[RankActor] = RankActor

    async def run(self, config: RunConfig) -> RunSummary:
        """Run a configuration to its end, or to the user's stop."""
        directory = create_run(config, self.parent)
        try:
            return await self._execute(directory, directory.config(), is_new=True)
        except UserError as error:
            if _leaves_nothing(error, directory):
                directory.discard()
            raise

    async def resume(self, directory: RunDirectory, config: RunConfig) -> RunSummary:
        """Go on with a run at its first uncommitted stage; the configuration is kept once its ranks are there."""
        return await self._execute(directory, config)

    async def _execute(self, directory: RunDirectory, config: RunConfig, *, is_new: bool = False) -> RunSummary:
        from flows.alignment import run_flow

        with (
            directory.locked(self.stop.request),
            controller_log(directory.logs) as log,
            LiveView(
                config.training.num_iterations, quiet=self.quiet, says_iterations=config.algorithm != "evaluate"
            ) as view,
        ):
            note, self.stop.note = self.stop.note, view.note
            execution = RunExecution(
                config=config,
                directory=directory,
                client=self.client,
                view=view,
                stop=self.stop,
                actor_class=self.actor_class,
            )
            try:
                result = await run_flow(execution)
            except Exception as error:
                details = error.details if isinstance(error, RankError) else ""
                logger.exception("the run failed: %s\n%s", error, details, extra=IN_FILE_ONLY)
                directory.check_there()  # else whatever failed has failed for that
                if not (is_new and _leaves_nothing(error, directory)):
                    for way in (*ways_on(error, config, directory.path), f"log: {log}"):
                        error.add_note(way)
                raise
            finally:
                self.stop.note = note
        return RunSummary(
            run_dir=str(directory.path),
            status=result.status,
            # after a stop in the middle of a recovery, more are committed than the ranks have replayed
            iterations=max(result.iterations, num_reported(read_metrics(directory.metrics))),
            metrics=result.metrics,
            recoveries=result.recoveries,
            evaluations=_evaluations(directory) if result.evaluated else [],
        )


def _leaves_nothing(error: Exception, directory: RunDirectory) -> bool:
    """A mistake of the user before anything was computed, whose line says all: nobody wants to resume that run, unless
    the line itself says so (ranks or a scheduler that went away)."""
    names_it = str(directory.path) in str(error)
    return isinstance(error, UserError) and not names_it and directory.holds_nothing()


@asynccontextmanager
async def session(
    config: RunConfig, *, parent: Location, num_workers: int, quiet: bool = False
) -> AsyncIterator[Session]:
    """Start what runs need: a local Prefect server, unless PREFECT_API_URL names one, and Dask."""
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        stack.enter_context(without_dask_chatter())
        stop.may_end_at_once = True
        # both take seconds to come up; Dask's client must be made in this task's own context
        starting = asyncio.ensure_future(stack.enter_async_context(_prefect(parent)))
        try:
            client = await stack.enter_async_context(dask_client(config, num_workers=num_workers))
            if config.cluster.scheduler is not None:
                await check_workers(client, config, parent)
        finally:
            server = await starting
        if server is not None:
            stack.enter_context(client_settings(server))
        yield Session(client=client, stop=stop, parent=parent, quiet=quiet)


@asynccontextmanager
async def _prefect(parent: Location) -> AsyncIterator[str | None]:
    """API URL of a server of our own; None where the user's environment names one."""
    if configured_api_url() is not None:
        yield None
        return
    server = LocalPrefectServer(local_side(parent) / HOME)
    try:
        await server.__aenter__()
    except (RuntimeError, OSError) as error:  # OSError: a full disk, or no server in time
        raise UserError(f"no local Prefect server in {server.home}: {error}") from error
    try:
        yield server.api_url
    finally:
        await server.__aexit__(None, None, None)


def ranks_needed(config: RunConfig) -> int:
    """Ranks, and so Dask workers, of a run."""
    return sum(pool_sizes(config).values())


def run(config: RunConfig, *, parent: Location | None = None, quiet: bool = False) -> RunSummary:
    """Run a configuration. Raises UserError for a user's mistake, before anything is started."""
    check(config)
    parent = parent or location(config.output)

    async def go() -> RunSummary:
        async with session(config, parent=parent, num_workers=ranks_needed(config), quiet=quiet) as open_session:
            return await open_session.run(config)

    return asyncio.run(go())


def _evaluations(directory: RunDirectory) -> list[dict[str, Any]]:
    return [entry.to_json() for entry in first_and_last(evaluations_of(read_metrics(directory.metrics)))]


def finished(directory: RunDirectory, overrides: Sequence[str] = ()) -> RunSummary:
    """The summary of a run with which nothing is left to do; nothing of the overrides, if any, had an effect."""
    without = f"--set {', '.join(map(shown_override, overrides))} had no effect: " if overrides else ""
    metrics = read_metrics(directory.metrics)[-1:]
    newest = CheckpointStore(directory.checkpoints).latest()
    return RunSummary(
        run_dir=str(directory.path),
        status="completed",
        iterations=newest.step if newest is not None else 0,
        metrics=metrics[0] if metrics else {},
        evaluations=_evaluations(directory),
        note=f"{without}nothing was left to do; --set training.num_iterations=N with a larger N goes on",
    )


def resume(run_dir: Location, overrides: Sequence[str] = (), *, quiet: bool = False) -> RunSummary:
    """Go on with a run; one that is finished is said to be, and nothing starts. Raises UserError for no run."""
    directory = RunDirectory.open(run_dir)
    config = config_to_resume(directory, overrides)
    return finished(directory, overrides) if config is None else go_on(directory, config, quiet=quiet)


def go_on(directory: RunDirectory, config: RunConfig, *, quiet: bool = False) -> RunSummary:
    """Go on with a run, with a configuration that has been checked (`config_to_resume`)."""

    async def go() -> RunSummary:
        parent = directory.path.parent
        async with session(config, parent=parent, num_workers=ranks_needed(config), quiet=quiet) as open_session:
            return await open_session.resume(directory, config)

    return asyncio.run(go())


__all__ = ["RunSummary", "Session", "finished", "go_on", "ranks_needed", "resume", "run", "session"]
