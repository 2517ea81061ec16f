"""The loop over iterations, with no-op models: order, versions, staleness."""

import asyncio

import pytest

from configs.schema import RunConfig
from pipeline.algorithms import get_algorithm
from pipeline.loop import required_version, run_iterations
from pipeline.models import Models
from pipeline.placement import pool_of
from pipeline.stages import RolloutsHandle, StageOutcome, StageSpec
from pipeline.trace import calls_per_pool, trace_async
from pipeline.turns import PoolTurns


class NoOpRun:
    """Models that only sleep; what ran, and which policy version generated."""

    def __init__(self, config: RunConfig, per_pool: dict[str, int]) -> None:
        self.config, self.turns = config, PoolTurns(per_pool)
        self.events: list[tuple[str, str]] = []
        self.version = 0
        self.generated_with: dict[int, int] = {}

    async def execute(self, spec: StageSpec) -> StageOutcome:
        pool, turn = pool_of(self.config, spec.call.role), (spec.key.iteration, spec.place)
        self.turns.enter(pool, turn)
        async with self.turns.turn(pool, turn):
            self.events.append(("start", spec.key.name))
            if spec.call.method == "generate_sequences":
                self.generated_with[spec.key.iteration] = self.version
            await asyncio.sleep(0.005)
            if spec.key.site == "actor.update_actor":
                self.version += 1
            self.events.append(("end", spec.key.name))
        return StageOutcome(num_rows=1, columns=dict.fromkeys(spec.call.writes, "nowhere"))

    async def iteration(self, index: int) -> None:
        self.turns.begin_iteration(index)
        models = Models(run="noop", iteration=index, config=self.config, execute=self.execute)
        await get_algorithm("grpo").function(models, RolloutsHandle(index))
        await self.turns.end_iteration(index)


async def _run(max_staleness: int, monkeypatch: pytest.MonkeyPatch) -> NoOpRun:
    from pipeline.calls import CALLS

    if max_staleness:  # generation in a pool of its own
        generate = CALLS["actor.generate_sequences"].__class__
        call = CALLS["actor.generate_sequences"]
        monkeypatch.setitem(
            CALLS,
            call.site,
            generate(
                role="cost",
                method=call.method,
                kind="column",
                protocol=call.protocol,
                writes=call.writes,
                new_rows=True,
            ),
        )
    config = RunConfig.model_validate(
        {
            "algorithm": "grpo",
            "rollout": {"num_samples": 2},
            "resources": {
                "num_ranks": 2,
                "pools": {"train": {"ranks": 1}, "rollout": {"ranks": 1}},
                "placement": {"cost": "rollout"},
            },
        }
    )
    calls = await trace_async(config)
    run = NoOpRun(config, dict(calls_per_pool(calls)))
    await run_iterations(run.iteration, first=0, end=4, max_staleness=max_staleness)
    return run


async def test_staleness_0_runs_one_iteration_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await _run(0, monkeypatch)
    iterations = [name[-2] for _, name in run.events]
    assert iterations == sorted(iterations)
    assert run.generated_with == {i: required_version(i, 0) for i in range(4)} == {0: 0, 1: 1, 2: 2, 3: 3}


async def test_staleness_1_generates_the_next_iteration_while_one_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = await _run(1, monkeypatch)
    names = [name for kind, name in run.events if kind == "start"]
    for index in range(3):
        ends = run.events.index(("end", f"actor.update_actor[{index}]"))
        begins = next(
            n
            for n, (k, name) in enumerate(run.events)
            if k == "start" and name.endswith(f"generate_sequences[{index + 1}]")
        )
        assert begins < ends, f"iteration {index + 1} did not generate while {index} trained"
    assert run.generated_with == {i: required_version(i, 1) for i in range(4)} == {0: 0, 1: 0, 2: 1, 3: 2}
    training = [name for name in names if "generate" not in name]
    assert [name[-2] for name in training] == sorted(name[-2] for name in training), (
        "training stages crossed iterations"
    )


async def test_an_error_stops_the_loop_and_is_raised() -> None:
    ran: list[int] = []

    async def start(index: int) -> None:
        ran.append(index)
        if index == 1:
            raise RuntimeError("stage failed")

    with pytest.raises(RuntimeError, match="stage failed"):
        await run_iterations(start, first=0, end=5)
    assert ran == [0, 1]
