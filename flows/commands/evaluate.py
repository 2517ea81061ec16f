"""evaluate: a model on held-out data sets, without training it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.checkpoint_paths import CheckpointPath
from configs.errors import UserError
from configs.evaluation import held_out, metric_prefix
from configs.loader import load_config, stated
from configs.schema import DatasetConfig, ModelConfig, RunConfig
from flows.commands.answer import OK, STOPPED, Answer, finite
from flows.commands.named_run import named_run
from flows.commands.tables import counted, print_table
from flows.hub_lookup import look_up
from flows.preflight import check
from storage.checkpoints import CheckpointStore
from storage.evaluations import samples_file
from storage.locations import Location, location
from storage.run_directory import RunDirectory
from storage.run_needs import CHECKPOINT
from workers import fork_server

if TYPE_CHECKING:
    from rich.console import Console

SOURCES = ("file", "datasets", "reasoning_gym")
ESTIMATE = re.compile(r"(mean|maj|pass|best)@\d+|.*_mean")


def evaluate(
    name_or_path: str,
    overrides: Sequence[str],
    *,
    checkpoint: str | None,
    datasets: Sequence[str],
    runs: Location | str,
    output: str | None,
    quiet: bool,
) -> Answer:
    """Generate, score and judge; the samples and every number are in a run directory of their own."""

    def configured(some: Sequence[str]) -> RunConfig:
        config = load_config(name_or_path, some)
        if output is not None:
            config = config.model_copy(update={"output": str(output)})
        return evaluation_config(config, checkpoint=checkpoint, datasets=datasets, runs=runs)

    config = configured(overrides)
    check(config, source=name_or_path, stated=replace(stated(name_or_path, overrides), configured=configured))
    look_up(config)
    fork_server.start(config)
    from flows.run import run as run_flow

    done = run_flow(config, parent=location(config.output), quiet=quiet)
    document = {
        "run_dir": done.run_dir,
        "status": done.status,
        "model": config.actor.path,
        "samples_per_prompt": config.evaluation.num_samples,
        "temperature": config.evaluation.temperature,
        "datasets": {name: _results(done.metrics, name, config, location(done.run_dir)) for name in held_out(config)},
    }
    return Answer(
        document=finite(document),
        show=lambda console: _show(console, document),
        exit_code=STOPPED if done.status == "stopped" else OK,
    )


def evaluation_config(
    config: RunConfig, *, checkpoint: str | None, datasets: Sequence[str], runs: Location | str
) -> RunConfig:
    """The configuration that evaluates and trains nothing.

    checkpoint: a run (its newest checkpoint), one of its checkpoints, or a Hugging Face directory; None: the
    actor as configured. datasets: NAME=[SOURCE:]PATH, in place of the configured ones.
    """
    changes: dict[str, Any] = {
        "algorithm": "evaluate",
        "name": f"{config.name}-evaluation",
        "evaluation": config.evaluation.model_copy(update={"every": None}),
        "training": config.training.model_copy(update={"num_iterations": 1}),
    }
    if checkpoint is not None:
        changes |= _with_checkpoint(config, checkpoint, runs)
    if datasets:
        named = dict(_dataset(text) for text in datasets)
        changes["evaluation"] = changes["evaluation"].model_copy(update={"datasets": named})
        changes["data"] = config.data.model_copy(update={"validation": None})
    return config.model_copy(update=changes)


def _with_checkpoint(config: RunConfig, checkpoint: str, runs: Location | str) -> dict[str, Any]:
    actor: ModelConfig = config.actor.model_copy(update={"path": _model_path(checkpoint, runs), "init": None})
    changes: dict[str, Any] = {"actor": actor}
    own = config.actor.path
    if config.tokenizer is None and own is not None and not str(actor.path).startswith("checkpoint:"):
        has_tokenizer = any(Path(str(actor.path)).glob("tokenizer*"))
        changes |= {} if has_tokenizer else {"tokenizer": own}
    return changes


def _model_path(checkpoint: str, runs: Location | str) -> str:
    """`actor.path` of a run, a checkpoint's folder, or a Hugging Face directory."""
    path = location(checkpoint)
    if _is_model(path):
        return str(path)
    if path.parent.name == "checkpoints" and path.name.isdigit():
        run, step = RunDirectory.open(path.parent.parent), int(path.name)
    else:
        name, _, at = checkpoint.rpartition("@")
        run = named_run(name if name and at.isdigit() else checkpoint, runs, CHECKPOINT)
        step = int(at) if name and at.isdigit() else -1
    steps = [committed.step for committed in CheckpointStore(run.checkpoints).committed()]
    if not steps:
        raise UserError(f"--checkpoint {checkpoint}: {run.path} has no committed checkpoint yet")
    if step >= 0 and step not in steps:
        raise UserError(
            f"--checkpoint {checkpoint}: {run.path} has no checkpoint of step {step}; "
            f"there are {', '.join(map(str, steps))}"
        )
    return str(CheckpointPath(run=str(run.path), step=steps[-1] if step < 0 else step, role="actor"))


def _is_model(path: Location) -> bool:
    """A run directory has a config.json too, without a model_type."""
    try:
        return "model_type" in json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _dataset(text: str) -> tuple[str, DatasetConfig]:
    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise UserError(f"--dataset {text}: write NAME=PATH, or NAME=SOURCE:PATH (sources: {', '.join(SOURCES)})")
    source, _, rest = path.partition(":")
    return (name, DatasetConfig.model_validate({"source": source, "path": rest}) if source in SOURCES and rest
            else DatasetConfig(path=path))  # fmt: skip


def _results(metrics: Mapping[str, Any], dataset: str, config: RunConfig, run_dir: Location) -> dict[str, Any]:
    """Estimates with their intervals, and where the samples are."""
    prefix = metric_prefix(dataset)
    own = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    estimates = {
        name: {"value": value, "low": own[f"{name}_low"], "high": own[f"{name}_high"]}
        for name, value in own.items()
        if f"{name}_low" in own and ESTIMATE.fullmatch(name)
    }
    others: dict[str, Any] = {name: own[name] for name in ("prompts", "reward_errors", "truncated") if name in own}
    samples = str(samples_file(run_dir, 0, dataset)) if config.evaluation.store_samples else None
    return {**others, "estimates": estimates, "samples": samples}


def _show(console: Console, document: Mapping[str, Any]) -> None:
    console.print(f"{document['model']}, {counted(document['samples_per_prompt'], 'sample')} a prompt", markup=False)
    for name, results in document["datasets"].items():
        rows = [
            (estimate, *(f"{of[part]:.4g}" if math.isfinite(of[part]) else "-" for part in ("value", "low", "high")))
            for estimate, of in results["estimates"].items()
        ]
        console.print(
            f"{name}: {counted(int(results['prompts']), 'prompt')}" if "prompts" in results else name, markup=False
        )
        print_table(console, ("estimate", "mean", "95 % low", "high"), rows, num_right=3)
        if results["samples"]:
            console.print(f"samples: {results['samples']}", markup=False)
