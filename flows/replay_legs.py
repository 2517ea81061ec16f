"""Under which settings the updates of a run's iterations ran, so that a replay has the same ones.

execution 1   0 ---------------- 20              every start of a run goes on from a checkpoint, or from the
execution 2                      20 ------- 30   first weights, and runs each later update itself
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from configs.errors import UserError
from configs.loader import from_tree
from configs.schema import RunConfig
from flows.preflight import check
from pipeline.calls import CALLS
from storage.executions import FILE, Execution, execution_of, read_executions
from storage.records import StageRecord
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory

BESIDE = ("output", "logging", "storage", "checkpoint", "cluster", "deployment")
"""Sections that no update depends on."""
UNKNOWN = f"ran under settings that {FILE} does not have"


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Iterations from `first` to `end` (exclusive), under one configuration."""

    first: int
    end: int
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    """configs: by iteration, in order. doubts: why the updates may have run under others, a sentence each."""

    configs: Mapping[int, RunConfig]
    doubts: tuple[str, ...] = ()


def settings_of(run: RunDirectory, iterations: range, *, by: int, config: RunConfig) -> Settings:
    """Settings of the updates that the weights of execution `by` hold.

    config: that execution's, in place of one that is not known or cannot be used here.
    """
    executions, store = read_executions(run.path), RolloutStore(run.rollouts)
    trees = {e.number: e.config for e in executions}
    usable = cache(lambda number: _usable(run, trees[number], config))
    configs: dict[int, RunConfig] = {}
    doubts: dict[str, list[int]] = {}
    for iteration in iterations:
        ran = execution_of(executions, iteration, by=by)
        logged = {r.execution for r in store.stages(iteration).values() if is_update(r)}
        configs[iteration], doubt = (config, "") if ran is None else usable(ran.number)
        if any(is_unknown(number, executions) for number in logged):
            doubt = UNKNOWN
        elif again := [n for n in sorted(logged) if ran is not None and not _alike(trees[n], ran.config)]:
            doubt = f"are stored as execution {again[0]} ran them again, under other settings"
        if doubt:
            doubts.setdefault(doubt, []).append(iteration)
    return Settings(configs=configs, doubts=tuple(f"{_updates(found)} {doubt}" for doubt, found in doubts.items()))


def is_unknown(number: int, executions: Sequence[Execution]) -> bool:
    """Whether an execution's line is not there. A run of a program that kept none has no number either."""
    return number not in {e.number for e in executions} and bool(number or executions)


def same_history(run: RunDirectory, iterations: range, one: int, other: int) -> bool:
    """Whether the weights of two executions hold these iterations' updates under the same settings."""
    executions = read_executions(run.path)
    pairs = {
        (a.number, b.number): (a, b)
        for i in iterations
        if (a := execution_of(executions, i, by=one)) and (b := execution_of(executions, i, by=other))
    }
    return all(a.number == b.number or _alike(a.config, b.config) for a, b in pairs.values())


def legs_of(configs: Mapping[int, RunConfig], *, target: int) -> list[Leg]:
    """Neighbours with the same settings together; those of `target` under its very configuration."""
    found: list[Leg] = []
    for iteration, config in configs.items():
        if found and _same(found[-1].config, config):
            config = config if iteration <= target else found[-1].config
            found[-1] = Leg(first=found[-1].first, end=iteration + 1, config=config)
        else:
            found.append(Leg(first=iteration, end=iteration + 1, config=config))
    return found


def is_update(record: StageRecord) -> bool:
    """Whether the record is of a stage that changed weights; evaluations are logged in the same form."""
    call = CALLS.get(record.stage.partition("#")[0])
    return record.kind == "state" and call is not None and call.kind == "state"


def _usable(run: RunDirectory, tree: Mapping[str, Any], config: RunConfig) -> tuple[RunConfig, str]:
    """What was recorded, in the cluster and the folders of `config`; else `config`, and why."""
    try:
        found = from_tree(dict(tree), str(run.path / FILE))
        found = found.model_copy(update={name: getattr(config, name) for name in BESIDE})
        if not _same(found, config):
            check(found, source=str(run.path / FILE))
    except UserError as error:
        return config, f"ran under settings that cannot be used here ({error})"
    return found, ""


def _same(one: RunConfig, other: RunConfig) -> bool:
    return _alike(one.model_dump(mode="json"), other.model_dump(mode="json"))


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    kept: list[dict[str, Any]] = [{k: v for k, v in tree.items() if k not in BESIDE} for tree in (one, other)]
    return kept[0] == kept[1]


def _updates(iterations: Sequence[int]) -> str:
    first, last = iterations[0], iterations[-1]
    return f"the updates of iteration{'s' * (last > first)} {first}" + (f" to {last}" if last > first else "")
