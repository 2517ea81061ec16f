"""Faults by the stage that they strike, and the run that they strike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from configs.schema import RunConfig
from tests.faults.ranks import FIRED, PLAN
from tests.flows.tiny_runs import ppo_config

NUM_ITERATIONS = 3
CALL_TIMEOUT_S = 6.0
"""Of runs with a rank that hangs."""
WORKER_RETURN_TIMEOUT_S = 1.0
"""Of runs that lose hosts."""
NUM_APART = {"host": 2, "hosts": 2}
"""Workers that can be lost for good, the last ones."""
MIN_RANKS = {"host": 1, "hosts": 2}
Fault = Literal[
    "kill", "hang", "host", "hosts", "controller", "everything", "scheduler", "disk", "reward", "request", "engine",
    "no",
]  # fmt: skip
STAGES = ("generate", "prepare", "update", "commit", "checkpoint")
POINTS: dict[str, tuple[str, str, int]] = {
    "generate": ("actor.generate_sequences[1]", "start", 1),
    "prepare": ("critic.compute_values[1]", "end", 1),
    "update": ("critic.update_critic[2]", "step", 1),
    "commit": ("actor.generate_sequences[1]", "commit", 0),
    "checkpoint": ("00000002", "save", 1),
}
"""Where a fault strikes: the stage, the moment, the rank. A checkpoint is made after two iterations and at the end."""
OTHER_POINTS: dict[tuple[str, str], tuple[str, str, int]] = {
    ("disk", "commit"): ("actor.generate_sequences[1]", "write", 0),
    ("disk", "checkpoint"): ("00000002", "write", 1),
    ("hosts", "update"): ("critic.update_critic[1]", "step", 2),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """kill, hang: of a rank. host: killed for good, worker and nanny. hosts: two, one after the other, of three, where
    the run may do without one. controller: killed, and Dask's scheduler with it. everything: those, the ranks and
    Prefect's server. scheduler: one of its own. disk: full. reward: a call that never returns. request: an engine
    drops it. engine: SGLang's processes, killed in a batch. no: the run that the others are compared with."""

    fault: Fault
    stage: str

    @property
    def name(self) -> str:
        return f"{self.fault}-{self.stage}"

    @property
    def undisturbed(self) -> Case:
        """The same run without the fault."""
        return UNDISTURBED_SGLANG if self.fault == "engine" else UNDISTURBED

    @property
    def point(self) -> tuple[str, str, int]:
        return OTHER_POINTS.get((self.fault, self.stage), POINTS[self.stage])


UNDISTURBED = Case(fault="no", stage="fault")
UNDISTURBED_SGLANG = Case(fault="no", stage="fault-sglang")
CASES = [
    *(Case(fault=f, stage=s) for f in ("kill", "hang", "host") for s in STAGES),
    *(Case(fault=f, stage=s) for f in ("controller", "everything", "scheduler") for s in STAGES),
    Case(fault="hosts", stage="update"),
    Case(fault="disk", stage="commit"),
    Case(fault="disk", stage="checkpoint"),
    Case(fault="reward", stage="prepare"),
    Case(fault="request", stage="generate"),
    Case(fault="engine", stage="generate"),
]  # fmt: skip


SGLANG = {"engine": "sglang", "start_timeout_s": 240, "max_new_tokens": 200, "top_k": 1}
"""Long enough to be killed in the middle. On a CPU its samples follow no seed: these are the likeliest tokens."""


def configuration(inputs: dict[str, str], folder: Path, case: Case) -> RunConfig:
    """The same run for every case but for its deadlines and its folder, and but for the engine that is killed."""
    reward = {
        "path": f"{Path(__file__).with_name('rewards.py')}:hang_once",
        "weight": 0.01, "timeout_s": 2.0, "retries": 1,
        "options": {"fired": str(folder / FIRED), "armed": str(folder / "reward.armed")},
    }  # fmt: skip
    changes: dict[str, Any] = {"rewards": {"functions": [reward], "num_processes": 1}}
    if case.fault == "hang":
        changes["cluster"] = {"call_timeout_s": CALL_TIMEOUT_S}
    if case.fault in MIN_RANKS:
        least = MIN_RANKS[case.fault]
        changes["resources"] = {"num_ranks": least + 1, "min_ranks": least}
        changes["cluster"] = {"worker_return_timeout_s": WORKER_RETURN_TIMEOUT_S}
    if UNDISTURBED_SGLANG in (case, case.undisturbed):
        changes |= {"rollout": SGLANG, "loss": {"rollout_correction": "none"}}
    return ppo_config(
        inputs,
        name=case.name,
        training={"num_iterations": NUM_ITERATIONS},
        checkpoint={"every": 2},
        **changes,
    )


def arm(case: Case, parent: Path, *, nannies: Mapping[int, int] = MappingProxyType({}), **more: Any) -> None:
    """Tell the ranks of the run under `parent` what to do, and when. nannies: of workers that can be lost, by rank."""
    if case.fault == "no":
        return
    if case.fault == "reward":
        (parent / "reward.armed").touch()
        return
    points = [case.point, *([POINTS[case.stage]] if case.fault == "hosts" else [])]
    plans = [
        {"fault": case.fault, "stage": stage, "at": at, "rank": rank, "nanny": nannies.get(rank), **more}
        for stage, at, rank in points
    ]
    (parent / PLAN).write_text(json.dumps(plans))
