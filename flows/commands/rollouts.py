"""rollouts ls, rollouts show: what a run stored, read without starting anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.errors import UserError
from flows.commands.answer import Answer, finite
from flows.commands.tables import number, print_table, printable, shorten
from pipeline.dropping import MARKERS, without_dropped
from pipeline.rollouts import Rollouts
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from rich.console import Console


def ls(name_or_path: str, runs: Path) -> Answer:
    """Iterations with their committed stages, rows, tokens and mean reward."""
    run = RunDirectory.resolve(name_or_path, runs)
    store = RolloutStore(run.rollouts)
    iterations = [_iteration(store, iteration) for iteration in store.iterations()]
    document = {"run": str(run.path), "iterations": iterations}
    return Answer(document=finite(document), show=lambda console: _show_iterations(console, run, iterations))


def _iteration(store: RolloutStore, iteration: int) -> dict[str, Any]:
    stages = store.stages(iteration)
    arrays = {array.name: array for record in stages.values() if not record.row_set for array in record.arrays}
    columns = [name for name in ("reward", "group", *MARKERS) if name in arrays]
    rewards = without_dropped(store.read(iteration, columns=columns))["reward"] if "reward" in arrays else None
    return {
        "iteration": iteration,
        "rows": arrays["offsets"].count - 1 if "offsets" in arrays else 0,
        "tokens": arrays["token_ids"].count if "token_ids" in arrays else 0,
        "mean_reward": float(rewards.mean()) if rewards is not None and len(rewards) else None,
        "stages": list(stages),
        "columns": [name for name in arrays if name != "offsets"],
    }


def _show_iterations(console: Console, run: RunDirectory, iterations: list[dict[str, Any]]) -> None:
    if not iterations:
        console.print(f"{run.path}: no committed rollouts yet", markup=False)
        return
    rows = [
        (
            str(i["iteration"]),
            str(i["rows"]),
            str(i["tokens"]),
            number(i["mean_reward"]),
            ", ".join(i["stages"]),
        )
        for i in iterations
    ]
    print_table(console, ("iteration", "rows", "tokens", "mean reward", "committed stages"), rows, num_right=4)


def show(name_or_path: str, runs: Path, *, iteration: int, prompt: int | None, tokens: bool) -> Answer:
    """The samples of an iteration, or of its `prompt`-th prompt (from 0), with every stored column."""
    run = RunDirectory.resolve(name_or_path, runs)
    store = RolloutStore(run.rollouts)
    if iteration not in store.iterations():
        raise UserError(f"--iteration {iteration}: not stored in {run.path}; {_stored(store.iterations())}")
    prompts = list(_prompts(store.read(iteration)))
    if prompt is not None and not 0 <= prompt < len(prompts):
        raise UserError(f"--prompt {prompt}: iteration {iteration} has prompts 0 to {len(prompts) - 1}")
    chosen = prompts if prompt is None else [prompts[prompt]]
    document = {"run": str(run.path), "iteration": iteration, "prompts": chosen}
    show_one = prompt is not None or tokens
    return Answer(
        document=finite(document),
        show=lambda console: _show_prompts(console, chosen, in_full=show_one, tokens=tokens),
    )


def _stored(iterations: list[int]) -> str:
    return f"there are {iterations[0]} to {iterations[-1]}" if iterations else "it has none yet"


def _prompts(rollouts: Rollouts) -> Iterator[dict[str, Any]]:
    """Rows of one group as one prompt; columns keep the names that they have in the store."""
    groups = rollouts["group"] if "group" in rollouts else np.arange(rollouts.num_rows)
    starts = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1)).tolist()
    ends = [*starts[1:], rollouts.num_rows]
    for position, (start, end) in enumerate(zip(starts, ends, strict=True)):
        first = _sample(rollouts, start)
        yield {
            "prompt": position,
            **{name: first[name] for name in PROMPT_COLUMNS if name in first},
            "prompt_tokens": _prompt_tokens(rollouts, start),
            "samples": [_without_prompt(_sample(rollouts, row)) for row in range(start, end)],
        }


PROMPT_COLUMNS = ("prompt_id", "group", "prompt_text", "answer")


def _without_prompt(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name not in PROMPT_COLUMNS}


def _sample(rollouts: Rollouts, row: int) -> dict[str, Any]:
    """Sample columns of the row, then its token columns from the first response token on."""
    start = int(rollouts.offsets[row]) + _prompt_length(rollouts, row)
    end = int(rollouts.offsets[row + 1])
    sample: dict[str, Any] = {name: column[row] for name, column in rollouts.sample_columns.items()}
    return sample | {name: column[start:end] for name, column in rollouts.token_columns.items()}


def _prompt_length(rollouts: Rollouts, row: int) -> int:
    return int(rollouts["prompt_length"][row]) if "prompt_length" in rollouts else 0


def _prompt_tokens(rollouts: Rollouts, row: int) -> list[int]:
    start = int(rollouts.offsets[row])
    ids: list[int] = rollouts["token_ids"][start : start + _prompt_length(rollouts, row)].tolist()
    return ids


def _show_prompts(console: Console, prompts: list[dict[str, Any]], *, in_full: bool, tokens: bool) -> None:
    if not in_full:
        rows = [_summary(prompt, sample) for prompt in prompts for sample in prompt["samples"]]
        header = (
            "prompt",
            "row of data",
            "sample",
            "tokens",
            "reward",
            "advantage",
            "prompt text",
            "response",
        )
        print_table(console, header, rows, num_right=6)
        return
    for prompt in prompts:
        answer = f"  answer {printable(str(prompt['answer']))}" if prompt.get("answer") else ""
        head = f"prompt {prompt['prompt']}, row {prompt.get('prompt_id', '?')} of the data{answer}"
        console.print(f"\n{head}\n{'-' * min(len(head), 80)}", markup=False)
        console.print(printable(str(prompt.get("prompt_text", prompt["prompt_tokens"]))), markup=False)
        for sample in prompt["samples"]:
            _show_sample(console, sample, tokens=tokens)


def _summary(prompt: dict[str, Any], sample: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(prompt["prompt"]),
        str(prompt.get("prompt_id", "")),
        str(sample.get("sample", "")),
        str(len(sample["token_ids"])),
        number(sample.get("reward")),
        number(_mean(sample.get("advantages"))),
        shorten(str(prompt.get("prompt_text", ""))),
        shorten(str(sample.get("text", ""))),
    )


def _mean(values: Any) -> float | None:
    return None if values is None or not len(values) else float(np.mean(values))


def _show_sample(console: Console, sample: dict[str, Any], *, tokens: bool) -> None:
    parts = [f"{name} {number(value)}" for name, value in sample.items() if name.startswith("reward")]
    means = [
        f"mean {name} {number(_mean(sample[name]))}"
        for name in ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
        if name in sample
    ]
    reason = sample.get("finish_reason", "")
    head = [f"{len(sample['token_ids'])} tokens", *([str(reason)] if reason else []), *parts, *means]
    console.print(f"\nsample {sample.get('sample', '')}:  {'  '.join(head)}", markup=False, style="bold")
    console.print(printable(str(sample.get("text", ""))), markup=False)
    if tokens:
        columns = {name: v for name, v in sample.items() if isinstance(v, np.ndarray) and v.ndim == 1}
        rows = [tuple(number(v[t]) for v in columns.values()) for t in range(len(sample["token_ids"]))]
        print_table(console, tuple(columns), rows, num_right=len(columns))
