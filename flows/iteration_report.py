"""What is said of an iteration: metrics to every sink, one Prefect artifact, a line in the view."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from configs.schema import RunConfig
from flows.artifacts import publish_iteration
from flows.live_view import LiveView
from flows.sinks import MetricsSinks
from pipeline.dropping import MARKERS, without_dropped
from pipeline.rollout_gap import gap_warning
from pipeline.stages import StageOutcome
from storage.evaluation_results import BEFORE, EVAL, STEP, Evaluated, evaluations_of
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory

logger = logging.getLogger(__name__)


def iteration_metrics(outcomes: Mapping[str, StageOutcome], *, seconds: float, num_ranks: int) -> dict[str, Any]:
    """All stages' metrics, the time of each stage (s), its peak memory on each rank (GiB) and tokens/s.

    tokens/s: prompt and response tokens of the batch over the iteration's time, as in the paper's section 8; none where
    stages came from the store, whose time is not in it. replayed: 1 where every stage had been committed before; then
    the updates alone were computed, again. ended_at: seconds since 1970.
    """
    metrics: dict[str, Any] = {}
    for stage, outcome in outcomes.items():
        metrics.update(outcome.metrics)
        if not outcome.from_store:
            metrics[f"time/{stage}"] = outcome.seconds
        metrics |= {f"memory_gib/{stage}/rank{rank}": gib for rank, gib in outcome.peak_gib.items()}
    metrics.pop("seconds", None)
    metrics["time/iteration"] = seconds
    metrics["ended_at"] = time.time()
    metrics["num_ranks"] = num_ranks
    metrics["stages_from_store"] = sum(outcome.from_store for outcome in outcomes.values())
    if outcomes and all(outcome.stored_by is not None for outcome in outcomes.values()):
        metrics["replayed"] = 1
    if metrics.get("tokens_total") and not metrics["stages_from_store"]:
        metrics["tokens_per_second"] = metrics["tokens_total"] / seconds
    return metrics


def evaluation_metrics(
    outcomes: Mapping[str, StageOutcome], iteration: int, *, before_training: Collection[str]
) -> dict[str, Any]:
    """After how many iterations the `eval/` metrics were measured (`eval/step`); those of before the training under
    a prefix of their own, where iteration 0 has both.

    before_training: names of the stages, as in `actor.evaluate[0]`, that ran before the first update.
    """
    first: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for stage, outcome in outcomes.items():
        found = first if f"{stage}[{iteration}]" in before_training else last
        found |= {name: value for name, value in outcome.metrics.items() if name.startswith(EVAL)}
    if not last:
        return {STEP: 0} if first else {}
    return {STEP: iteration + 1, **{BEFORE + name.removeprefix(EVAL): value for name, value in first.items()}}


def new_evaluations(
    outcomes: Mapping[str, StageOutcome], iteration: int, *, since: int, before_training: Collection[str]
) -> list[Evaluated]:
    """Those that were made now, or committed by execution `since` or a later one."""
    made = {stage: o for stage, o in outcomes.items() if o.stored_by is None or o.stored_by >= since}
    metrics = {name: value for outcome in made.values() for name, value in outcome.metrics.items()}
    own = evaluation_metrics(made, iteration, before_training=before_training)
    return evaluations_of([{"iteration": iteration, **metrics, **own}])


class IterationReporter:
    """Publishes behind the loop's back, one iteration at a time, in order."""

    def __init__(self, *, directory: RunDirectory, config: RunConfig, view: LiveView) -> None:
        self._directory, self._config, self._view = directory, config, view
        self._sinks = MetricsSinks(directory, config)
        self._logging: asyncio.Task[bool] | None = None
        self._last: asyncio.Task[None] | None = None

    def publish(
        self,
        iteration: int,
        metrics: Mapping[str, Any],
        outcomes: Mapping[str, StageOutcome],
        *,
        evaluated: Sequence[Evaluated],
        committed: asyncio.Task[None] | None,
    ) -> None:
        """Report an iteration once its stages are committed and the one before is reported.

        evaluated: the evaluations that it made.
        """
        said = [] if self._config.algorithm == "evaluate" else evaluated
        for entry in (entry for entry in said if not entry.step):
            self._view.note(entry.sentence())
        self._view.iteration_finished(iteration, metrics)
        for entry in (entry for entry in said if entry.step):
            self._view.note(entry.sentence())
        warnings = [warning for warning in (gap_warning(metrics, self._config),) if warning is not None]
        for warning in warnings:
            logger.warning("iteration %d: %s", iteration, warning)
            self._view.note(f"iteration {iteration}: {warning}")
        logged = self._logging = asyncio.create_task(self._log(self._logging, iteration, metrics, committed))
        self._last = asyncio.create_task(self._publish(self._last, logged, iteration, metrics, outcomes, warnings))

    async def logged(self) -> None:
        """Wait until the metrics of what was published are on the disk; a checkpoint after them does not outlive them.

        Raises StorageError where the disk refuses.
        """
        if self._logging is not None:
            await self._logging

    async def _log(
        self,
        before: asyncio.Task[bool] | None,
        iteration: int,
        metrics: Mapping[str, Any],
        committed: asyncio.Task[None] | None,
    ) -> bool:
        if before is not None:
            await before
        if committed is not None:
            await asyncio.wait({committed})
            if committed.cancelled() or committed.exception() is not None:
                return False  # the committer raises it; an iteration that is not committed is not reported
        await asyncio.to_thread(self._sinks.log, iteration, metrics)
        return True

    async def _publish(
        self,
        before: asyncio.Task[None] | None,
        logged: asyncio.Task[bool],
        iteration: int,
        metrics: Mapping[str, Any],
        outcomes: Mapping[str, StageOutcome],
        warnings: Sequence[str],
    ) -> None:
        if before is not None:
            await before
        if await logged and self._config.logging.artifacts:
            seconds = {stage: outcome.seconds for stage, outcome in outcomes.items() if not outcome.from_store}
            best, worst = await asyncio.to_thread(self._extremes, iteration)
            name, run = self._config.name, self._directory.path.name
            await publish_iteration(name, run, iteration, metrics, seconds, best, worst, warnings=warnings)

    def _extremes(self, iteration: int) -> tuple[str, str]:
        """The samples with the highest and the lowest reward, of those that count."""
        store = RolloutStore(self._directory.rollouts)
        records = store.stages(iteration).values()
        present = {name for record in records if not record.row_set for name in record.columns}
        if "reward" not in present:
            return "", ""
        columns = [name for name in ("reward", "prompt_text", "text", "group", *MARKERS) if name in present]
        batch = without_dropped(store.read(iteration, columns=columns))
        reward = batch["reward"]
        if not len(reward):
            return "", ""
        best, worst = int(np.argmax(reward)), int(np.argmin(reward))
        return tuple(f"{batch['prompt_text'][i]}{batch['text'][i]} ({reward[i]:.3f})" for i in (best, worst))  # type: ignore[return-value]

    async def close(self) -> None:
        """Wait for the last report and close the sinks."""
        if self._last is not None:
            await self._last
        self._sinks.close()
