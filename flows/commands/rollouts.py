"""rollouts ls, rollouts show: what a run stored, read without starting anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.errors import UserError
from flows.commands.answer import Answer, finite
from flows.commands.named_run import named_run
from flows.commands.sample_view import mean_of, show_in_full
from flows.commands.tables import number, print_table, shorten
from flows.commands.tokenizers import tokenizer_folders
from pipeline.dropping import MARKERS, without_dropped
from pipeline.rollouts import Array, Rollouts
from storage.columns import IO_THREADS
from storage.locations import Location
from storage.records import ArrayRecord, StageRecord
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from storage.run_needs import ROLLOUTS
from storage.samples import load_samples
from storage.token_text import TokenTexts
from storage.where import parse_where

if TYPE_CHECKING:
    from rich.console import Console


WIDTH = 100
"""Columns that a list keeps within, unless texts of the run need more."""


def ls(name_or_path: str, runs: Location | str) -> Answer:
    """Iterations with their committed stages, rows, tokens and mean reward."""
    run = named_run(name_or_path, runs, ROLLOUTS)
    store = RolloutStore(run.rollouts)
    with ThreadPoolExecutor(IO_THREADS) as pool:  # an object store's answers are waited for together
        found = list(pool.map(lambda iteration: _iteration(store, iteration), store.names()))
    iterations = [entry for entry in found if entry["stages"]]
    document = {"run": str(run.path), "iterations": iterations}
    return Answer(document=finite(document), show=lambda console: _show_iterations(console, run, iterations))


def _iteration(store: RolloutStore, iteration: int) -> dict[str, Any]:
    stages = store.stages(iteration)
    arrays = {array.name: array for record in stages.values() if not record.row_set for array in record.arrays}
    return {
        "iteration": iteration,
        "rows": arrays["offsets"].count - 1 if "offsets" in arrays else 0,
        "tokens": arrays["token_ids"].count if "token_ids" in arrays else 0,
        "mean_reward": _mean_reward(store, iteration, stages, arrays),
        "stages": list(stages),
        "columns": [name for name in arrays if name != "offsets"],
    }


def _mean_reward(
    store: RolloutStore, iteration: int, stages: Mapping[str, StageRecord], arrays: Mapping[str, ArrayRecord]
) -> float | None:
    """As the reward's stage has logged it, so that a long run is listed without opening a column; else computed."""
    if "reward" not in arrays:
        return None
    logged = [record.metrics["reward_mean"] for record in stages.values() if "reward_mean" in record.metrics]
    if logged and logged[0] is not None:
        return float(logged[0])
    columns = [name for name in ("reward", "group", *MARKERS) if name in arrays]
    rewards = without_dropped(store.read(iteration, columns=columns))["reward"]
    return float(rewards.mean()) if len(rewards) else None


def _show_iterations(console: Console, run: RunDirectory, iterations: list[dict[str, Any]]) -> None:
    if not iterations:
        console.print(f"{run.path}: no committed rollouts yet", markup=False)
        return
    named = list(dict.fromkeys(stage for i in iterations for stage in i["stages"]))
    apart = [stage for stage in named if _evaluates(stage)] if not all(map(_evaluates, named)) else []
    stages = [stage for stage in named if stage not in apart]
    rows = [
        (str(i["iteration"]), str(i["rows"]), str(i["tokens"]), number(i["mean_reward"]), _committed(i, stages))
        for i in iterations
    ]
    print_table(console, ("iteration", "rows", "tokens", "mean reward", "committed stages"), rows, num_right=4)
    legend = ", ".join(f"{place} {name}" for place, name in enumerate(stages, start=1))
    legend += f"; evaluation, in some iterations only: {', '.join(apart)}" if apart else ""
    console.print(fill(f"stages: {legend}", WIDTH, subsequent_indent="  "), markup=False, soft_wrap=True)


def _evaluates(stage: str) -> bool:
    return stage.rpartition(".")[2].startswith("evaluate")


def _committed(iteration: dict[str, Any], stages: Sequence[str]) -> str:
    """`1 to 7`, `1 to 3, 5`, `1 to 7 + evaluation`: numbers of its stages among every iteration's."""
    places = sorted(stages.index(name) + 1 for name in iteration["stages"] if name in stages)
    evaluated = " + evaluation" if len(places) < len(iteration["stages"]) else ""
    starts = [place for place in places if place - 1 not in places]
    ends = [place for place in places if place + 1 not in places]
    spans = (str(start) if start == end else f"{start} to {end}" for start, end in zip(starts, ends, strict=True))
    return ", ".join(spans) + evaluated


@dataclass(frozen=True, kw_only=True)
class Look:
    """How samples are shown. color: the token column that colours them."""

    tokens: bool = False
    color: str | None = None
    side_by_side: bool = False

    @property
    def in_full(self) -> bool:
        return self.tokens or self.side_by_side or self.color is not None


def show(
    name_or_path: str, runs: Location | str, *, iteration: int, prompt: int | None, where: str | None, look: Look
) -> Answer:
    """The samples of an iteration (-1: the last) that match `where`, or of its `prompt`-th prompt (from 0), with every
    stored column."""
    condition = parse_where(where) if where else None
    run = named_run(name_or_path, runs, ROLLOUTS)
    store = RolloutStore(run.rollouts)
    stored = store.names()
    asked, iteration = iteration, stored[iteration] if -len(stored) <= iteration < 0 else iteration
    if iteration < 0 or not store.stages(iteration):
        raise UserError(f"--iteration {asked}: not stored in {run.path}; {_stored(stored)}")
    samples = load_samples(store, iteration, None)
    kept = np.ones(len(samples), bool) if condition is None else condition.rows(samples)
    # A computed column that colours is kept like a stored one.
    rollouts = samples.rollouts.with_columns(token={look.color: samples.token(look.color)} if look.color else {})
    prompts = list(_prompts(rollouts, kept))
    if prompt is not None and not 0 <= prompt < len(prompts):
        raise UserError(f"--prompt {prompt}: iteration {iteration} has prompts 0 to {len(prompts) - 1}")
    chosen = [entry for entry in (prompts if prompt is None else [prompts[prompt]]) if entry["samples"]]
    document = {"run": str(run.path), "iteration": iteration, "prompts": chosen}
    if not (look.in_full or prompt is not None):
        return Answer(document=finite(document), show=lambda console: _show_summary(console, chosen))
    texts = TokenTexts(tokenizer_folders(run))
    return Answer(document=finite(document), show=lambda console: show_in_full(console, chosen, look, texts))


def _stored(iterations: list[int]) -> str:
    return f"there are {iterations[0]} to {iterations[-1]}" if iterations else "it has none yet"


def _prompts(rollouts: Rollouts, kept: Array) -> Iterator[dict[str, Any]]:
    """Kept rows ([B] bool) of one group as one prompt; columns keep the names that they have in the store."""
    groups = rollouts["group"] if "group" in rollouts else np.arange(rollouts.num_rows)
    starts = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1)).tolist()
    ends = [*starts[1:], rollouts.num_rows]
    for position, (start, end) in enumerate(zip(starts, ends, strict=True)):
        first = _sample(rollouts, start)
        yield {
            "prompt": position,
            **{name: first[name] for name in PROMPT_COLUMNS if name in first},
            "prompt_tokens": _prompt_tokens(rollouts, start),
            "samples": [_without_prompt(_sample(rollouts, row)) for row in range(start, end) if kept[row]],
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


def _show_summary(console: Console, prompts: list[dict[str, Any]]) -> None:
    rows = [_summary(prompt, sample) for prompt in prompts for sample in prompt["samples"]]
    header = ("prompt", "row of data", "sample", "tokens", "reward", "advantage", "prompt text", "response")
    print_table(console, header, rows, num_right=6)


def _summary(prompt: dict[str, Any], sample: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(prompt["prompt"]),
        str(prompt.get("prompt_id", "")),
        str(sample.get("sample", "")),
        str(len(sample["token_ids"])),
        number(sample.get("reward")),
        number(mean_of(sample.get("advantages"))),
        shorten(str(prompt.get("prompt_text", ""))),
        shorten(str(sample.get("text", ""))),
    )
