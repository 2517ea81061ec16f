"""One rank in the test's own process: the real context and stage methods, without Dask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import workers.stage_methods  # noqa: F401 - registers them
from configs.schema import RunConfig
from pipeline.calls import CALLS
from pipeline.rollouts import Rollouts
from pipeline.stages import ColumnsRef, StageKey
from tests.workers.reference import single_rank_mesh
from workers.data_plane import DataPlane
from workers.process_group import Joined, PoolGroup
from workers.rank_actor import StageRequest
from workers.rank_context import RankContext
from workers.role_model import RoleModel
from workers.stage_output import StageOutput
from workers.stage_registry import get_method


class InProcessPlane(DataPlane):
    """Columns by iteration and row set, in memory."""

    def __init__(self) -> None:
        self.rollouts: dict[int, Rollouts] = {}
        self.others: dict[tuple[int, str], Rollouts] = {}

    def get(self, ref: ColumnsRef, columns: Sequence[str]) -> Rollouts:
        held = self.others[ref.iteration, ref.row_set] if ref.row_set else self.rollouts[ref.iteration]
        return held.only(columns)


class OneRank:
    """`run` executes a call on this rank and keeps its columns, as the data plane would."""

    def __init__(self, config: RunConfig, run_dir: Path, *roles: str) -> None:
        mesh, device = single_rank_mesh(), torch.device("cpu")
        control = dist.group.WORLD
        assert control is not None
        alone = PoolGroup(rank=0, size=1, control=control, writers=control)
        self.plane = InProcessPlane()
        self.context = RankContext(
            config=config,
            device=device,
            joined=Joined(pool=alone, everyone=alone, mesh_ranks=range(1)),
            mesh=mesh,
            plane=self.plane,
            models={role: RoleModel.build(role, config, mesh, device) for role in roles},
            roles=roles,
            run_dir=run_dir,
            global_rank=0,
        )

    def run(self, site: str, iteration: int = 0, row_set: str = "", **arguments: Any) -> StageOutput:
        call = CALLS[site]
        rows: Any = (iteration, row_set) if row_set else iteration
        place: dict[Any, Rollouts] = self.plane.others if row_set else self.plane.rollouts  # type: ignore[assignment]
        held = place.get(rows)
        columns = dict.fromkeys(() if held is None or call.new_rows else held.columns, "here")
        request = StageRequest(
            key=StageKey(run="test", iteration=iteration, site=site),
            role=call.role,
            method=call.method,
            rollouts=ColumnsRef(iteration=iteration, num_rows=0, columns=columns, row_set=row_set),
            row_set=row_set,
            reads=tuple(n.rstrip("?") for n in call.reads if not n.endswith("?") or n[:-1] in columns),
            shard=0,
            num_shards=1,
            collect=True,
            incarnation=0,
            arguments=arguments,
        )
        output = get_method(call.role, call.method)(self.context, request)
        if output.columns is not None:
            new = output.columns
            place[rows] = (
                new
                if output.new_rows or held is None
                else held.with_columns(token=new.token_columns, sample=new.sample_columns)
            )
        return output

    def commit(self, iteration: int) -> None:
        """Store the iteration's rollouts, for what reads history."""
        store = self.context.store
        columns = self.plane.rollouts[iteration]
        manifest = store.write(iteration, "actor.generate_sequences", columns, new_rows=True, attempt="1")
        store.commit(iteration, manifest)

    def close(self) -> None:
        """End engines and child processes; the process group stays for the other tests."""
        for name in ("engines", "environments", "reward_functions"):
            if name in self.context.__dict__:
                getattr(self.context, name).close()
