"""Runs that a fault strikes, one after the other on one cluster; each goes on until it is at its end."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from configs.errors import UserError
from configs.loader import apply_overrides
from configs.schema import RunConfig
from configs.yaml_text import dump_yaml
from flows.run import RunSummary, Session, session
from storage.run_directory import RunDirectory
from tests.faults.cases import MIN_RANKS, NUM_APART, UNDISTURBED, Case, arm, configuration
from tests.faults.ranks import EXECUTED, FIRED, FaultyRank
from tests.faults.scheduler import OwnCluster, cluster_of_its_own
from tests.flows.tiny_runs import write_inputs

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Struck:
    """How a case went. begun: (stage, Unix time) in order; struck_at, resumed_at: Unix times.

    summary: of the run, or of its resume in this process (None: it was in another). stopped: the line with which
    the run ended before it was resumed, if it did by itself.
    """

    case: Case
    run_dir: Path
    summary: RunSummary | None
    begun: tuple[tuple[str, float], ...]
    struck_at: float | None
    resumed_at: float | None
    stopped: str | None = None

    @property
    def executed(self) -> Counter[str]:
        """How often each stage was begun."""
        return Counter(name for name, _ in self.begun)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What the ways below return."""

    run_dir: Path
    summary: RunSummary | None = None
    resumed_at: float | None = None
    stopped: str | None = None


async def strike_all(
    cases: Sequence[Case], folder: Path, *, resume_elsewhere: bool = False
) -> dict[str, Struck | BaseException]:
    """Every case by its name, and the undisturbed runs.

    resume_elsewhere: a run whose controller was killed goes on in a process of its own, as a user's would.
    """
    inputs = write_inputs(folder)
    config = configuration(inputs, folder, UNDISTURBED)
    results: dict[str, Struck | BaseException] = {}
    async with session(config, parent=folder, num_workers=2, quiet=True) as shared:
        for case in dict.fromkeys([*(case.undisturbed for case in cases), *cases]):
            run = _strike(case, shared, inputs, folder / case.name, resume_elsewhere)
            (results[case.name],) = await asyncio.gather(run, return_exceptions=True)
    return results


async def _strike(case: Case, shared: Session, inputs: dict[str, str], parent: Path, resume_elsewhere: bool) -> Struck:
    parent.mkdir()
    config = configuration(inputs, parent, case)
    arm(case, parent)
    here = dataclasses.replace(shared, parent=parent, actor_class=FaultyRank)
    if case.fault in ("controller", "everything"):
        ended = await _killed(config, here, alone=case.fault == "everything", elsewhere=resume_elsewhere)
    elif case.fault == "scheduler":
        ended = await _gone_on_with(config, here, await _without_scheduler(case, config, here))
    elif case.fault in MIN_RANKS:
        ended = await _without_hosts(case, config, here)
    elif case.fault == "disk":
        ended = await _gone_on_with(config, here, await _stopped(config, here))
    else:
        summary = await here.run(config)
        ended = Ended(run_dir=Path(summary.run_dir), summary=summary)
    lines = [line.split() for line in (parent / EXECUTED).read_text().splitlines()]
    fired = parent / FIRED
    return Struck(
        case=case,
        begun=tuple((name, float(at)) for name, at in lines),
        struck_at=float(fired.read_text().split()[0]) if fired.exists() else None,
        **{field.name: getattr(ended, field.name) for field in dataclasses.fields(ended)},
    )


async def _stopped(config: RunConfig, first: Session) -> str:
    """A run that ends with an error of the user's kind: its line."""
    try:
        await first.run(config)
    except UserError as error:
        return str(error)
    raise AssertionError("the run did not stop")


async def _gone_on_with(config: RunConfig, here: Session, stopped: str) -> Ended:
    (run_dir,) = here.parent.glob(f"{config.name}-2*")
    resumed_at = time.time()
    summary = await here.resume(RunDirectory.open(run_dir), config)
    return Ended(run_dir=run_dir, summary=summary, resumed_at=resumed_at, stopped=stopped)


async def _without_scheduler(case: Case, config: RunConfig, here: Session) -> str:
    """On a cluster whose scheduler is a process of its own."""
    async with cluster_of_its_own(num_workers=2) as cluster:
        arm(case, here.parent, pid=cluster.scheduler)
        async with _attached(config, cluster, here) as (attached, there):
            return await _stopped(attached, there)


async def _without_hosts(case: Case, config: RunConfig, here: Session) -> Ended:
    """On a cluster that loses its last workers for good. A run that stops goes on as its line says."""
    num_apart = NUM_APART[case.fault]
    num_workers = config.resources.num_ranks - num_apart
    async with cluster_of_its_own(num_workers=num_workers, num_apart=num_apart) as cluster:
        arm(case, here.parent, nannies=cluster.nannies)
        async with _attached(config, cluster, here) as (attached, there):
            if case.fault == "host":
                summary = await there.run(attached)
                return Ended(run_dir=Path(summary.run_dir), summary=summary)
            stopped = await _stopped(attached, there)
    return await _gone_on_with(apply_overrides(config, re.findall(r"--set (\S+)", stopped)), here, stopped)


@asynccontextmanager
async def _attached(config: RunConfig, cluster: OwnCluster, here: Session) -> AsyncIterator[tuple[RunConfig, Session]]:
    """The run's configuration and session on a cluster of its own."""
    of_this = config.cluster.model_copy(update={"scheduler": cluster.address})
    attached = config.model_copy(update={"cluster": of_this})
    num_workers = attached.resources.num_ranks
    async with session(attached, parent=here.parent, num_workers=num_workers, quiet=True) as there:
        yield attached, dataclasses.replace(there, actor_class=FaultyRank)


async def _killed(config: RunConfig, here: Session, *, alone: bool, elsewhere: bool) -> Ended:
    """A run in a process of its own until it is killed. alone: with a Prefect server of its own, too."""
    parent = here.parent
    file = parent / "config.yaml"
    file.write_text(dump_yaml(config.model_dump(mode="json")))
    await asyncio.to_thread(_controller, -9, parent, alone, "run", str(file), str(parent))
    (run_dir,) = parent.glob(f"{config.name}-2*")
    resumed_at, summary = time.time(), None
    if elsewhere or alone:
        await asyncio.to_thread(_controller, 0, parent, alone, "resume", str(run_dir))
    else:
        summary = await here.resume(RunDirectory.open(run_dir), config)
    return Ended(run_dir=run_dir, summary=summary, resumed_at=resumed_at)


def _controller(code: int, parent: Path, alone: bool, *arguments: str) -> None:
    """A process that ends with this code."""
    command = [sys.executable, "-P", "-m", "tests.faults.controller", *arguments]
    inherited = {name: value for name, value in os.environ.items() if not (alone and name.startswith("PREFECT_"))}
    log = parent / "controller.txt"
    with log.open("ab") as output:
        environment = {**inherited, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=240, check=False)
    assert done.returncode == code, f"the controller ended with {done.returncode}:\n{log.read_text()[-3000:]}"
