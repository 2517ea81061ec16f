"""Whole iterations of any algorithm on one rank in this process: real stage methods, no Dask, Prefect or store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

import workers.held_out_stages
import workers.safe_rlhf_stages
import workers.stage_methods  # noqa: F401 - both register the built-in ones
from configs.schema import RunConfig
from pipeline.algorithms import get_algorithm
from pipeline.calls import present_columns
from pipeline.coefficients import Coefficients
from pipeline.models import Models, gather
from pipeline.placement import needs_model
from pipeline.rollouts import Rollouts
from pipeline.stages import ColumnsRef, RolloutsHandle, StageOutcome, StageSpec
from pipeline.trace import roles_of, trace, updates_of_roles
from workers.data_plane import DataPlane, Rows
from workers.rank_actor import RankSpec, StageRequest
from workers.rank_context import RankContext, build_context
from workers.stage_output import StageOutput
from workers.stage_registry import get_method


class MemoryPlane(DataPlane):
    """The columns of the iteration at hand stay in this process."""

    def __init__(self) -> None:
        self._held: dict[Rows, Rollouts] = {}

    @property
    def address(self) -> str:
        """Nobody else reads: the loopback address."""
        return "tcp://127.0.0.1:0"

    def get(self, ref: ColumnsRef, columns: Sequence[str]) -> Rollouts:
        return self._held[ref.iteration, ref.row_set].only(columns)

    def add(self, request: StageRequest, output: StageOutput) -> None:
        """What a stage made, beside the columns that are there."""
        if output.columns is None:
            return
        rows, new = (request.key.iteration, request.row_set), output.columns
        self._held = {held: columns for held, columns in self._held.items() if held[0] == request.key.iteration}
        if not output.new_rows:
            new = self._held[rows].with_columns(token=new.token_columns, sample=new.sample_columns)
        self._held[rows] = new


class InProcessRun:
    """An algorithm's iterations, one after the other, as `hybridflow run` would make them on one rank."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        calls = trace(config)
        self.config, self.plane = config, MemoryPlane()
        self.coefficients = Coefficients.of(config, {})
        self.context = _context(config, folder, self.plane, roles_of(calls), updates_of_roles(calls))
        self.iteration = 0

    def step(self) -> dict[str, float]:
        """One iteration; the metrics of all its stages."""
        outcomes = asyncio.run(self._iterate())
        self.coefficients = self.coefficients.after(outcomes)
        self.iteration += 1
        return {name: value for outcome in outcomes.values() for name, value in outcome.metrics.items()}

    def close(self) -> None:
        self.context.close()

    async def _iterate(self) -> dict[str, StageOutcome]:
        outcomes: dict[str, StageOutcome] = {}

        async def execute(spec: StageSpec) -> StageOutcome:
            outcomes[spec.key.stage] = self._execute(spec)
            return outcomes[spec.key.stage]

        models = Models(run="in-process", iteration=self.iteration, config=self.config, execute=execute)
        await get_algorithm(self.config.algorithm).function(models, RolloutsHandle(self.iteration))
        await gather(*models.stages)
        return outcomes

    def _execute(self, spec: StageSpec) -> StageOutcome:
        call, model = spec.call, self.context.models.get(spec.call.role)
        also = {name: present_columns(call.also_reads[name], ref.columns) for name, ref in spec.others.items()}
        request = StageRequest(
            key=spec.key,
            role=call.role,
            method=call.method,
            rollouts=spec.rollouts,
            reads=present_columns(call.reads, spec.rollouts.columns),
            shard=0,
            num_shards=1,
            collect=True,
            incarnation=0,
            weights_version=None if model is None else model.version,
            arguments={**spec.arguments, **self.coefficients.arguments(call.site)},
            row_set=spec.row_set,
            others=spec.others,
            also_reads=also,
        )
        output = get_method(call.role, call.method)(self.context, request)
        self.plane.add(request, output)
        names = output.columns.columns if output.columns is not None else ()
        metrics = {f"{spec.row_set}/{n}" if spec.row_set else n: v for n, v in output.metrics.items()}
        return StageOutcome(num_rows=output.num_rows, columns=dict.fromkeys(names, "here"), metrics=metrics)


def _context(
    config: RunConfig, folder: Path, plane: DataPlane, roles: set[str], updates: Mapping[str, int]
) -> RankContext:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    spec = RankSpec(
        config=config,
        run_dir=str(folder),
        pool="main",
        pool_rank=0,
        pool_size=1,
        global_rank=0,
        roles=tuple(sorted(role for role in roles if needs_model(config, role) or role in ("reward", "cost"))),
        trained=tuple(sorted(updates)),
        updates=updates,
        incarnation=0,
        rendezvous=(str(store.host), int(store.port)),
    )
    return build_context(spec, plane, store=store)
