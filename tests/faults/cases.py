"""Runs that a fault strikes, and what they must end in: the weights and samples of the run without it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from configs.schema import RunConfig
from configs.yaml_text import dump_yaml
from flows.run import RunSummary, Session, session
from storage.run_directory import RunDirectory
from tests.faults.ranks import EXECUTED, FIRED, PLAN, FaultyRank
from tests.flows.tiny_runs import ppo_config, write_inputs

ROOT = Path(__file__).parents[2]
NUM_ITERATIONS = 3
CALL_TIMEOUT_S = 6.0
"""Of runs with a rank that hangs."""
Fault = Literal["kill", "hang", "controller", "reward", "engine"]
POINTS: dict[str, tuple[str, str, int]] = {
    "generate": ("actor.generate_sequences[1]", "start", 1),
    "prepare": ("critic.compute_values[1]", "end", 1),
    "update": ("critic.update_critic[2]", "step", 1),
    "commit": ("actor.generate_sequences[1]", "commit", 0),
    "checkpoint": ("00000002", "save", 1),
}
"""Where a fault strikes: the stage, the moment, the rank. A checkpoint is made after two iterations and at the end."""


@dataclass(frozen=True, kw_only=True)
class Case:
    fault: Fault
    stage: str

    @property
    def name(self) -> str:
        return f"{self.fault}-{self.stage}"


@dataclass(frozen=True, kw_only=True)
class Struck:
    """How a case went. begun: (stage, Unix time) in order; struck_at, resumed_at: Unix times.

    summary: of the run, or of its resume in this process (None: it was in another).
    """

    case: Case | None
    run_dir: Path
    summary: RunSummary | None
    begun: tuple[tuple[str, float], ...]
    struck_at: float | None
    resumed_at: float | None

    @property
    def executed(self) -> Counter[str]:
        """How often each stage was begun."""
        return Counter(name for name, _ in self.begun)


def configuration(inputs: dict[str, str], folder: Path, case: Case | None) -> RunConfig:
    """The same run for every case but for its deadlines and its folder."""
    reward = {
        "path": f"{Path(__file__).with_name('rewards.py')}:hang_once",
        "weight": 0.01, "timeout_s": 2.0, "retries": 1,
        "options": {"fired": str(folder / FIRED), "armed": str(folder / "reward.armed")},
    }  # fmt: skip
    changes: dict[str, Any] = {"rewards": {"functions": [reward], "num_processes": 1}}
    if case is not None and case.fault == "hang":
        changes["cluster"] = {"call_timeout_s": CALL_TIMEOUT_S}
    if case is not None and case.fault == "engine":
        changes["rollout"] = SGLANG
    return ppo_config(
        inputs,
        name=case.name if case is not None else "undisturbed",
        training={"num_iterations": NUM_ITERATIONS},
        checkpoint={"every": 2},
        **changes,
    )


SGLANG = {"engine": "sglang", "temperature": 0.0, "num_samples": 1, "start_timeout_s": 240}
"""Greedy: SGLang's samples are no function of a seed on a CPU."""


async def strike_all(
    cases: Sequence[Case], folder: Path, *, resume_elsewhere: bool = False
) -> dict[str, Struck | BaseException]:
    """Every case, and `undisturbed`, one after the other on one cluster of two ranks.

    resume_elsewhere: a run whose controller was killed goes on in a process of its own, as a user's would.
    """
    inputs = write_inputs(folder)
    config = configuration(inputs, folder, None)
    results: dict[str, Struck | BaseException] = {}
    async with session(config, parent=folder, num_workers=2, quiet=True) as shared:
        for case in (None, *cases):
            name = case.name if case is not None else "undisturbed"
            run = _strike(case, shared, inputs, folder / name, resume_elsewhere)
            (results[name],) = await asyncio.gather(run, return_exceptions=True)
    return results


async def _strike(
    case: Case | None, shared: Session, inputs: dict[str, str], parent: Path, resume_elsewhere: bool
) -> Struck:
    parent.mkdir()
    config = configuration(inputs, parent, case)
    _arm(case, parent)
    summary, resumed_at = None, None
    here = dataclasses.replace(shared, parent=parent, actor_class=FaultyRank)
    if case is not None and case.fault == "controller":
        run_dir = await asyncio.to_thread(_killed_controller, config, parent)
        resumed_at = time.time()
        if resume_elsewhere:
            await asyncio.to_thread(_controller, 0, parent, "resume", str(run_dir))
        else:
            summary = await here.resume(RunDirectory.open(run_dir), config)
    else:
        summary = await here.run(config)
        run_dir = Path(summary.run_dir)
    lines = [line.split() for line in (parent / EXECUTED).read_text().splitlines()]
    fired = parent / FIRED
    return Struck(
        case=case,
        run_dir=run_dir,
        summary=summary,
        begun=tuple((name, float(at)) for name, at in lines),
        struck_at=float(fired.read_text()) if fired.exists() else None,
        resumed_at=resumed_at,
    )


def _arm(case: Case | None, parent: Path) -> None:
    if case is None:
        return
    if case.fault == "reward":
        (parent / "reward.armed").touch()
        return
    stage, at, rank = POINTS[case.stage]
    plan = {"fault": case.fault, "stage": stage, "at": at, "rank": rank}
    (parent / PLAN).write_text(json.dumps(plan))


def _killed_controller(config: RunConfig, parent: Path) -> Path:
    """A run in a process of its own, until its own rank kills it; the run directory."""
    file = parent / "config.yaml"
    file.write_text(dump_yaml(config.model_dump(mode="json")))
    _controller(-9, parent, "run", str(file), str(parent))
    (run,) = parent.glob(f"{config.name}-2*")
    return run


def _controller(code: int, parent: Path, *arguments: str) -> None:
    """A process that ends with this code."""
    command = [sys.executable, "-P", "-m", "tests.faults.controller", *arguments]
    log = parent / "controller.txt"
    with log.open("ab") as output:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=240, check=False)
    assert done.returncode == code, f"the controller ended with {done.returncode}:\n{log.read_text()[-3000:]}"
