"""Progress of a run on Prefect's page: a bar for its iterations and one for the stage that runs, updated in place."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from flows.artifacts import artifact_key, one_line, reaching_server
from storage.run_status import RunStatus

RUN, STAGE = "progress", "stage"
Bars = Mapping[str, tuple[float, str]]
"""By the end of the artifact's key: per cent, and what it says."""


class ProgressArtifacts:
    """name: the configuration's, of which the artifacts' keys are made. stages: calls of an iteration."""

    def __init__(self, name: str, *, run: str, stages: int) -> None:
        self._name, self._run, self._stages = name, run, stages
        self._ids: dict[str, UUID] = {}
        self._shown: dict[str, tuple[float, str]] = {}

    async def show(self, status: RunStatus) -> None:
        """Make or change the artifacts, from inside a flow run; a server that cannot be reached is one warning."""
        for kind, bar in progress_bars(status, stages=self._stages).items():
            if self._shown.get(kind) != bar:
                self._shown[kind] = bar
                await reaching_server(self._run, "progress", self._put(kind, *bar))

    async def _put(self, kind: str, percent: float, text: str) -> None:
        from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact

        description = f"{one_line(self._run)}: {one_line(text)}"
        if kind in self._ids:
            await aupdate_progress_artifact(self._ids[kind], percent, description)
        else:
            key = artifact_key(self._name, kind)
            self._ids[kind] = await acreate_progress_artifact(percent, key, description)


def progress_bars(status: RunStatus, *, stages: int) -> dict[str, tuple[float, str]]:
    """The run: finished iterations, and of the ones under way their share by finished stages. The stage: what its
    ranks count (mean of those that run); 0 where they count nothing."""
    done, total = status.iterations_done, status.iterations_total
    under_way = min(1.0, (status.stages_done + sum(s.share or 0.0 for s in status.stages)) / max(stages, 1))
    share = (done + under_way) / total if done < total else 1.0
    bars = {RUN: (round(100 * share, 1), f"{done} of {total} iterations")}
    if status.stages:
        mean = sum(stage.share or 0.0 for stage in status.stages) / len(status.stages)
        bars[STAGE] = (round(100 * mean, 1), ", ".join(stage.name for stage in status.stages))
    elif done >= total:
        bars[STAGE] = (100.0, "no stage is left")
    return bars
