"""Rank actors on which a fault strikes once, at a told point; imported by the worker processes.

The plan is `fault.json` beside the run's directory: a list of {"fault", "stage", "at", "rank"}, one after the other.
The process that is struck first leaves the time in `fault.fired`, a line a fault. `executed` has a line for each stage
that the first rank has begun: its name and the time.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pipeline.stages import StageKey
from storage.rollout_store import RolloutStore
from storage.run_status import read_status
from workers.envelope import Envelope
from workers.rank_actor import RankActor, StageRequest

if TYPE_CHECKING:  # as in workers.rank_actor: the controller imports no torch
    from workers.rank_context import RankContext
    from workers.stage_output import StageOutput
    from workers.stage_registry import StageMethod

PLAN, FIRED, EXECUTED = "fault.json", "fault.fired", "executed"
INTO_BATCH_S = 0.2
"""From the start of a generation to the moment at which its engine is killed."""


class FaultyRank(RankActor):
    """at: `start` and `end` of a stage, its second optimizer `step`, its `commit` (written, not yet
    committed), `save` (a checkpoint's shards are written, not yet committed), `write` (of either begins)."""

    @cached_property
    def folder(self) -> Path:
        assert self._spec is not None
        return Path(self._spec.run_dir).parent

    def method(self, role: str, method: str) -> StageMethod:
        compute = super().method(role, method)

        def run(context: RankContext, request: StageRequest) -> StageOutput:
            name = request.key.name
            if context.group.rank == 0:
                with (self.folder / EXECUTED).open("a") as file:
                    file.write(f"{name} {time.time()}\n")
            self.strike(name, "start")
            if self.is_planned(name, "step"):
                self.strike_in_second_step(context.models[role].optimizer, name)
            output = compute(context, request)
            self.strike(name, "end")
            return output

        return run

    def _publish(self, request: StageRequest, output: StageOutput) -> None:
        self.strike(request.key.name, "write")
        super()._publish(request, output)

    async def manifest(self, key: StageKey) -> Envelope:
        manifest = await super().manifest(key)
        make_room()
        self.strike(key.name, "commit")
        return manifest

    def save_checkpoint(self, path: str, roles: tuple[str, ...], incarnation: int) -> Envelope:
        self.strike(Path(path).stem, "write")
        versions: Envelope = super().save_checkpoint(path, roles, incarnation)
        self.strike(Path(path).stem, "save")
        return versions

    async def checkpoint_saved(self) -> Envelope:
        saved = await super().checkpoint_saved()
        make_room()
        return saved

    def strike_in_second_step(self, optimizer: Any, name: str) -> None:
        step, steps = optimizer.step, iter(range(100))

        def struck(**arguments: Any) -> Any:
            if next(steps) == 1:
                self.strike(name, "step")
            return step(**arguments)

        optimizer.step = struck

    def wait_for_the_generation_of(self, iteration: int) -> None:
        """Until it is committed (beside this stage): from then on it must not be repeated."""
        assert self._spec is not None
        store = RolloutStore(Path(self._spec.run_dir) / "rollouts")
        while "actor.generate_sequences" not in store.stages(iteration):
            time.sleep(0.01)

    @property
    def controller(self) -> int:
        """Its process, which holds the Dask scheduler of a local cluster, too."""
        assert self._spec is not None
        status = read_status(Path(self._spec.run_dir))
        assert status is not None
        return status.pid

    def is_planned(self, stage: str, at: str) -> bool:
        assert self._spec is not None
        wanted = {"stage": stage, "at": at, "rank": self._spec.global_rank}
        return wanted.items() <= self.plan().items()

    def plan(self) -> dict[str, Any]:
        """The next fault; empty when all have struck."""
        plans = json.loads((self.folder / PLAN).read_text()) if (self.folder / PLAN).exists() else []
        fired = (self.folder / FIRED).read_text().splitlines() if (self.folder / FIRED).exists() else []
        return dict(plans[len(fired)]) if len(fired) < len(plans) else {}

    def fire(self) -> None:
        with (self.folder / FIRED).open("a") as file:
            file.write(f"{time.time()}\n")

    def strike(self, stage: str, at: str) -> None:
        if not self.is_planned(stage, at):
            return
        if at in ("end", "step"):
            self.wait_for_the_generation_of(int(stage.partition("[")[2].rstrip("]")))
        plan = self.plan()
        if plan["fault"] != "engine":
            self.fire()
        self.suffer(plan)

    def suffer(self, plan: dict[str, Any]) -> None:
        match plan["fault"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "host" | "hosts":
                os.kill(plan["nanny"], signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "controller":
                os.kill(self.controller, signal.SIGKILL)
                time.sleep(60)  # nothing comes between the kill and the end of this process
            case "everything":
                kill_all(self.controller)
            case "scheduler":
                os.kill(plan["pid"], signal.SIGKILL)
            case "disk":
                fill_disk()
            case "request":
                self.drop_one_request()
            case "engine":
                threading.Thread(target=self.kill_engine_in_batch, daemon=True).start()
            case unknown:
                raise ValueError(unknown)

    def drop_one_request(self) -> None:
        assert self._context is not None
        engine = self._context.engines.engine
        assert engine is not None
        generate = engine.generate

        def dropping(*arguments: Any) -> Any:
            engine.generate = generate  # type: ignore[method-assign]
            return generate(*arguments)[:-1]

        engine.generate = dropping  # type: ignore[method-assign]

    def kill_engine_in_batch(self) -> None:
        """Its launcher, once the engine computes."""
        assert self._context is not None
        launcher = self._context.engines.engine.launcher_pid  # type: ignore[union-attr]
        time.sleep(INTO_BATCH_S)
        self.fire()
        os.kill(launcher, signal.SIGKILL)


def kill_all(controller: int) -> None:
    """The controller and all that it has started: servers first, so that none starts another; this process last."""
    tree = psutil.Process(controller).children(recursive=True)
    for process in (psutil.Process(controller), *tree):
        if process.pid != os.getpid():
            process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk() -> None:
    """The system refuses every byte that this process would add to a file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def make_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
