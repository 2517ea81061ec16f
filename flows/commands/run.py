"""run, resume, quickstart."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.checks import config_warnings
from configs.errors import refuse
from configs.loader import load_config, resolved, stated
from configs.path_checks import output_problems
from configs.schema import RunConfig
from flows.commands.answer import OK, STOPPED, Answer, finite
from flows.commands.tables import counted
from flows.hints import typed_command
from flows.hub_lookup import look_up
from flows.preflight import check
from storage.evaluation_results import evaluation_lines
from storage.locations import Location, location
from workers import fork_server

if TYPE_CHECKING:
    from rich.console import Console

    from flows.run import RunSummary
    from pipeline.trace import TracedCall


def run(name_or_path: str, overrides: Sequence[str], output: str | None, *, dry_run: bool, quiet: bool) -> Answer:
    """Check the configuration, then run it (or say what would run)."""

    def configured(some: Sequence[str]) -> RunConfig:
        return load_config(name_or_path, some if output is None else [*some, f"output={json.dumps(output)}"])

    config = configured(overrides)
    whole = replace(stated(name_or_path, overrides), configured=configured)
    check(config, source=name_or_path, stated=whole, trains=True)
    for line in config_warnings(config):
        print(f"hybridflow: warning: {name_or_path}: {line}", file=sys.stderr)
    if dry_run:
        return _plan(config)
    look_up(config)
    fork_server.start(config)  # before imports that take seconds, too
    from flows.run import run as run_flow

    return _summary(run_flow(config, parent=location(config.output), quiet=quiet))


def resume(name_or_path: str, overrides: Sequence[str], runs: Location | str, *, quiet: bool) -> Answer:
    """Go on with a run where it was left."""
    from flows.resume_config import config_to_resume
    from storage.run_directory import RunDirectory

    directory = RunDirectory.resolve(name_or_path, runs)
    config = config_to_resume(directory, overrides)
    if config is not None:
        fork_server.start(config)
    from flows.run import finished, go_on

    return _summary(finished(directory, overrides) if config is None else go_on(directory, config, quiet=quiet))


def quickstart(output: Path, *, quiet: bool) -> Answer:
    """SFT, reward model and PPO on a small model made from scratch."""
    refuse(f"--{problem}" for problem in output_problems(RunConfig(output=str(output))))
    from flows.quickstart import quickstart as quickstart_flow

    document = quickstart_flow(output, quiet=quiet)
    stopped = document.get("status") == "stopped"
    return Answer(document=finite(document), show=lambda _: None, exit_code=STOPPED if stopped else OK)


def _summary(summary: RunSummary) -> Answer:
    stopped = summary.status == "stopped"
    return Answer(
        document=finite(asdict(summary)),
        show=lambda console: _show_summary(console, summary),
        exit_code=STOPPED if stopped else OK,
    )


def _show_summary(console: Console, summary: RunSummary) -> None:
    console.print(f"{summary.status}: {counted(summary.iterations, 'iteration')} in {summary.run_dir}", markup=False)
    for line in evaluation_lines(summary.evaluations):
        console.print(line, markup=False, soft_wrap=True)
    if summary.note:
        console.print(summary.note, markup=False)
    if summary.status == "stopped":
        console.print(f"go on with: {typed_command()} resume {summary.run_dir}", markup=False)
    else:
        console.print(f"look at it: {typed_command()} rollouts ls {summary.run_dir}", markup=False)


def _plan(config: RunConfig) -> Answer:
    from pipeline.trace import trace

    calls = trace(config)
    document = {
        "dry_run": True,
        "pools": _pools(config, calls),
        "calls": [asdict(call) for call in calls],
        "config": resolved(config),
    }
    return Answer(document=document, show=lambda console: _show_plan(console, config, calls))


def _show_plan(console: Console, config: RunConfig, calls: list[TracedCall]) -> None:
    training, data, rollout = config.training, config.data, config.rollout
    lines = {
        "algorithm": config.algorithm,
        "iterations": f"{training.num_iterations}, a checkpoint every {config.checkpoint.every}",
        "batch": f"{data.batch_size} x {counted(rollout.num_samples, 'sample')}",
        "updates": f"{training.num_epochs} x {training.num_mini_batches} (epochs x mini-batches)",
        "data": f"{data.train.source} {data.train.path}" if data.train else "none",
        "run directory": f"{config.output}/{config.name}-DATE-TIME",
    }
    for pool, what in _pools(config, calls).items():
        lines[f"pool {pool}"] = f"{counted(what['ranks'], 'rank')}: {', '.join(what['roles'])}"
    width = max(map(len, lines))
    for name, text in lines.items():
        console.print(f"{name:<{width}}  {text}", markup=False)
    console.print("calls of an iteration:")
    for call in calls:
        console.print(f"  {call.stage}  on {call.pool}", markup=False)
    console.print("nothing was started (--dry-run)")


def _pools(config: RunConfig, calls: list[TracedCall]) -> dict[str, dict[str, Any]]:
    """Ranks of each pool, and the roles that the algorithm calls there."""
    from pipeline.placement import pool_sizes

    return {
        pool: {"ranks": size, "roles": sorted({call.role for call in calls if call.pool == pool})}
        for pool, size in pool_sizes(config).items()
    }
