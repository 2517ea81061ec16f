"""checkpoints ls, checkpoints export."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from configs.errors import UserError, shown, suggestion
from configs.schema import Role
from flows.commands.answer import Answer, finite
from flows.commands.named_run import named_run
from flows.commands.tables import number, print_table, size
from storage.checkpoints import Checkpoint, CheckpointStore, metric_value
from storage.locations import Location
from storage.own_files import refuse_own_files
from storage.run_directory import RunDirectory
from storage.run_needs import CHECKPOINT

if TYPE_CHECKING:
    from rich.console import Console


def ls(name_or_path: str, runs: Location | str) -> Answer:
    """Committed checkpoints, also damaged ones, with their step, size and the state saved with them."""
    run = named_run(name_or_path, runs, CHECKPOINT)
    store = _store(run)
    best = store.best()
    rows = [
        {**_row(checkpoint), "best": best is not None and best.step == checkpoint.step}
        for checkpoint in store.committed()
    ]
    damaged = [{"step": step, "error": str(error)} for step, error in store.damaged().items()]
    document = {"run": str(run.path), "checkpoints": rows, "damaged": damaged}
    return Answer(document=finite(document), show=lambda console: _show(console, run, rows, damaged))


def _row(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "path": str(checkpoint.path),
        "bytes": sum(size for size, _ in checkpoint.files.values()),
        "state": dict(checkpoint.state),
        "metric": metric_value(checkpoint),
    }


def _show(console: Console, run: RunDirectory, rows: list[dict[str, Any]], damaged: list[dict[str, Any]]) -> None:
    for entry in damaged:
        console.print(f"step {entry['step']} is damaged: {entry['error']}", markup=False, soft_wrap=True)
    if not rows and damaged:
        return
    if not rows:
        console.print(f"{run.path}: no committed checkpoint yet", markup=False)
        return
    cells = [(str(row["step"]), size(row["bytes"]), number(row["metric"]), row["path"],
              "best" if row["best"] else "") for row in rows]  # fmt: skip
    print_table(console, ("step", "size", "metric", "path", ""), cells, num_right=3)


def export(
    name_or_path: str,
    runs: Location | str,
    destination: Path,
    *,
    step: int | None,
    role: str | None,
    best: bool = False,
    dtype: str = "float32",
) -> Answer:
    """Write one role of a checkpoint as a Hugging Face directory; no cluster is started."""
    run = named_run(name_or_path, runs, CHECKPOINT)
    config = run.config()
    chosen = _role(role or {"reward_model": "reward", "cost_model": "cost"}.get(config.algorithm, "actor"))
    store = _store(run)
    checkpoint = _best(store, run) if best else _checkpoint(store, run, step)
    store.verify(checkpoint)
    refuse_own_files(destination, "")
    _require_empty(destination)
    from workers.checkpoint_io import export_checkpoint

    export_checkpoint(checkpoint.path, chosen, config, destination, dtype=dtype)
    document = {"run": str(run.path), "step": checkpoint.step, "role": chosen, "path": str(destination)}
    text = f"{chosen} of step {checkpoint.step} is in {destination}"
    return Answer(document=document, show=lambda console: console.print(text, markup=False))


def _role(name: str) -> Role:
    roles: tuple[Role, ...] = get_args(Role)
    for role in roles:
        if role == name:
            return role
    raise UserError(f"--role {name}: there is no such role; {suggestion(name, roles)}")


def _require_empty(destination: Path) -> None:
    """Makes the folder: what cannot be made is found before anything is loaded."""
    try:
        destination.mkdir(parents=True, exist_ok=True)
        empty = not any(destination.iterdir()) and os.access(destination, os.W_OK)
    except FileExistsError:
        empty = False
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{shown(str(destination))}: cannot be made: {reason}; name another folder") from error
    if not empty:
        raise UserError(f"{destination}: exists and is not an empty folder that can be written to; name another one")


def _store(run: RunDirectory) -> CheckpointStore:
    return CheckpointStore(run.checkpoints, best_mode=run.config().checkpoint.best_mode)


def _best(store: CheckpointStore, run: RunDirectory) -> Checkpoint:
    best = store.best()
    if best is None:
        raise UserError(f"--best: no checkpoint of {run.path} has a metric; `checkpoint.best_metric` names one")
    return best


def _checkpoint(store: CheckpointStore, run: RunDirectory, step: int | None) -> Checkpoint:
    committed, damaged = store.committed(), store.damaged()
    if step is not None and step in damaged:
        raise damaged[step]
    if damaged and not committed:
        raise next(iter(damaged.values()))
    if not committed:
        raise UserError(f"{run.path}: no committed checkpoint yet; `checkpoint.every` says when one is made")
    if step is None:
        return store.latest() or committed[-1]
    for checkpoint in committed:
        if checkpoint.step == step:
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in committed)
    raise UserError(f"--step {step}: {run.path} has no such checkpoint; there are {steps}")
