"""Which task runs a stage hangs on: the edges of the graph that Prefect's page draws of a run."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import State

from pipeline.calls import also_read, present_columns
from pipeline.stages import StageOutcome, StageSpec

TaskState = State[Any]


class TaskGraph:
    """A stage hangs on those that made the columns it reads; one that reads none, on the updates of the weights."""

    def __init__(self) -> None:
        self._makers: dict[tuple[int, str, str], TaskState] = {}
        self._updates: dict[str, TaskState] = {}

    @property
    def updates(self) -> list[TaskState]:
        """The newest update of every role."""
        return list(self._updates.values())

    def before(self, spec: StageSpec) -> list[TaskState]:
        """Final states of the task runs that this stage hangs on, each once."""
        read = [(spec.rollouts, present_columns(spec.call.reads, spec.rollouts.columns))]
        read += [(ref, also_read(spec.call, name, ref.columns)) for name, ref in spec.others.items()]
        makers = [self._makers.get((ref.iteration, ref.row_set, column)) for ref, columns in read for column in columns]
        return list({id(state): state for state in makers if state is not None}.values()) or self.updates

    def ran(self, spec: StageSpec, outcome: StageOutcome, state: TaskState) -> None:
        """The stage has ended in this state."""
        if spec.call.kind == "state":
            self._updates[spec.call.site] = state
        self._makers |= dict.fromkeys(((spec.key.iteration, spec.row_set, name) for name in outcome.columns), state)

    def forget(self, iteration: int) -> None:
        """Nothing more will read this iteration's columns."""
        self._makers = {key: state for key, state in self._makers.items() if key[0] != iteration}
