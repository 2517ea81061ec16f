"""The controller's benchmark: its ranks, whose models sleep, do what a rank actor asks of a context."""

from __future__ import annotations

from pathlib import Path

from benchmarks.sleeping_models import SleepingRank
from configs.schema import RunConfig
from pipeline.stages import ColumnsRef, StageKey
from tests.workers.one_rank import InProcessPlane
from workers.rank_actor import RankSpec, StageRequest


class Placed(SleepingRank):
    """Set up without a cluster."""

    def place(self, spec: RankSpec) -> None:
        self._spec, self._context = spec, self.build(spec, InProcessPlane())  # type: ignore[arg-type, assignment]


def test_a_sleeping_rank_runs_a_stage(tmp_path: Path) -> None:
    options = {"num_samples": 3, "num_tokens": 4, "sleep_s": 0.0}
    config = RunConfig.model_validate({"data": {"train": {"path": "none", "options": options}}})
    rank = Placed()
    rank.place(
        RankSpec(
            config=config, run_dir=str(tmp_path), pool="main", pool_rank=1, pool_size=2, global_rank=1,
            roles=("actor",), trained=("actor",), incarnation=1,
        )
    )  # fmt: skip
    request = StageRequest(
        key=StageKey(run="r", iteration=0, site="actor.update_actor"), role="actor", method="update_actor",
        rollouts=ColumnsRef(iteration=0, num_rows=3), reads=(), shard=1, num_shards=2, collect=False, incarnation=1,
    )  # fmt: skip
    reply = rank.run_stage(request).unwrap("here")
    assert reply.num_rows == 3
