"""rollouts diff: the same prompts in two iterations, of one run or of two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from configs.errors import UserError, printable
from flows.commands.answer import Answer, finite
from flows.commands.named_run import named_run
from flows.commands.tables import number, print_table, shorten
from pipeline.rollouts import Array
from storage.locations import Location
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from storage.run_needs import ROLLOUTS
from storage.samples import Samples, chosen_iterations, known_columns, load_samples
from storage.shared_prompts import likest_pair, prompts_by_iteration

if TYPE_CHECKING:
    from rich.console import Console

COMPARED = ("reward", "length")
LOOKED_AT = 32
"""Iterations at each end of a run among which a pair is looked for: a run of any length answers in about a second."""
READ = ("prompt_id", "prompt_text", "text", "reward")


def diff(
    name_or_path: str,
    runs: Location | str,
    *,
    first: str | None,
    second: str | None,
    other: str | None,
    prompt_id: int | None,
) -> Answer:
    """Mean reward and length of every prompt that both iterations have; or one prompt's samples side by side.

    first, second: None: of the first and last `LOOKED_AT` iterations the pair that shares the most prompts, of those
    the one whose iterations are furthest apart.
    """
    run = named_run(name_or_path, runs, ROLLOUTS)
    of_second = named_run(other, runs, ROLLOUTS) if other else run
    open_ends = [option for option, given in (("--first", first), ("--second", second)) if given is None]
    if open_ends:
        first, second = _chosen_pair(run, of_second, first, second, prompt_id)
    before, after = _load(run, str(first), "--first"), _load(of_second, str(second), "--second")
    shared = np.intersect1d(before.sample("prompt_id"), after.sample("prompt_id"))
    if prompt_id is not None:
        if prompt_id not in shared:
            raise UserError(f"--prompt-id {prompt_id}: not in both iterations; shared are {_some(shared)}")
        shared = np.array([prompt_id])
    prompts = [_compare(before, after, int(prompt), texts=prompt_id is not None) for prompt in shared]
    prompts.sort(key=lambda prompt: prompt["change"]["reward"] or 0.0)
    document = {
        "first_run": str(run.path),
        "second_run": str(of_second.path),
        "first": before.iteration,
        "second": after.iteration,
        "chosen": bool(open_ends),
        "overall": {"first": _means(before), "second": _means(after)},
        "only_first": len(np.setdiff1d(before.sample("prompt_id"), after.sample("prompt_id"))),
        "only_second": len(np.setdiff1d(after.sample("prompt_id"), before.sample("prompt_id"))),
        "prompts": prompts,
    }
    return Answer(
        document=finite(document), show=lambda console: _show(console, document, open_ends, texts=prompt_id is not None)
    )


def _chosen_pair(
    run: RunDirectory, of_second: RunDirectory, first: str | None, second: str | None, prompt_id: int | None
) -> tuple[str, str]:
    """The iterations to compare where not both are named; the outermost where none share a prompt."""
    firsts = _prompts(run, first, "--first")
    seconds = firsts if of_second == run and first == second else _prompts(of_second, second, "--second")
    best = likest_pair(firsts, seconds, same_run=of_second == run, prompt_id=prompt_id)
    if best is None and prompt_id is not None:
        raise UserError(f"--prompt-id {prompt_id}: no two iterations of {run.path} have it; compare with --other RUN")
    best = best or (min(firsts), max(seconds))
    return str(best[0]), str(best[1])


def _prompts(run: RunDirectory, iteration: str | None, option: str) -> dict[int, frozenset[int]]:
    """Prompts of the first and last iterations, or of the one that is named."""
    store = RolloutStore(run.rollouts)
    found = chosen_iterations(iteration, store.names(), option=option)
    return prompts_by_iteration(store, sorted({*found[:LOOKED_AT], *found[-LOOKED_AT:]}))


def _load(run: RunDirectory, iteration: str, option: str) -> Samples:
    store = RolloutStore(run.rollouts)
    chosen = chosen_iterations(iteration, store.names(), option=option)
    if len(chosen) != 1:
        raise UserError(f"{option} {iteration}: one iteration must stand there, such as 3 or -1")
    known = known_columns(store, chosen[0])
    if "prompt_id" not in known:
        raise UserError(f"iteration {chosen[0]} of {run.path} stores no prompt_id, by which prompts are compared")
    return load_samples(store, chosen[0], [name for name in READ if name in known])


def _some(values: Array) -> str:
    shown = ", ".join(map(str, values[:10].tolist()))
    return f"{shown}, ..." if len(values) > 10 else shown or "none"


def _compare(before: Samples, after: Samples, prompt: int, *, texts: bool) -> dict[str, Any]:
    sides = [_side(samples, prompt, texts=texts) for samples in (before, after)]
    change = {name: None if None in (a := [side["mean"][name] for side in sides]) else a[1] - a[0] for name in COMPARED}
    return {"prompt_id": prompt, "prompt_text": sides[0]["prompt_text"], "change": change,
            "first": sides[0], "second": sides[1]}  # fmt: skip


def _side(samples: Samples, prompt: int, *, texts: bool) -> dict[str, Any]:
    rows = np.flatnonzero(samples.sample("prompt_id") == prompt)
    means = _means(samples, rows)
    prompt_text = str(samples.sample("prompt_text")[rows[0]]) if "prompt_text" in samples.known else ""
    side: dict[str, Any] = {"samples": len(rows), "mean": means, "prompt_text": prompt_text}
    if texts:
        side["rows"] = [
            {name: samples.sample(name)[row] for name in ("text", "reward", "length") if name in samples.known}
            for row in rows
        ]
    return side


def _means(samples: Samples, rows: Array | slice = slice(None)) -> dict[str, float | None]:
    return {name: _mean(samples.sample(name)[rows]) if name in samples.known else None for name in COMPARED}


def _mean(values: Array) -> float | None:
    mean = float(np.mean(values)) if len(values) else float("nan")
    return mean if np.isfinite(mean) else None


def _names(document: dict[str, Any]) -> tuple[str, str]:
    """What is compared, for a heading: iterations, with their runs where these are two."""
    first, second = f"iteration {document['first']}", f"iteration {document['second']}"
    runs = document["first_run"], document["second_run"]
    if runs[0] == runs[1]:
        return first, second
    names = runs[0].rpartition("/")[2], runs[1].rpartition("/")[2]
    of_first, of_second = runs if names[0] == names[1] else names
    return f"{first} of {of_first}", f"{second} of {of_second}"


def _show(console: Console, document: dict[str, Any], open_ends: list[str], *, texts: bool) -> None:
    first, second = _names(document)
    if texts:
        prompt = document["prompts"][0]
        console.print(printable(f"prompt {prompt['prompt_id']}: {prompt['prompt_text']}"), markup=False)
        sides = [[_cell(row) for row in prompt[side]["rows"]] for side in ("first", "second")]
        length = max(map(len, sides))
        columns = [side + [""] * (length - len(side)) for side in sides]
        print_table(console, (first, second), list(zip(*columns, strict=True)))
        return
    _show_overall(console, document, open_ends)
    if document["prompts"]:
        _show_prompts(console, document)


def _show_overall(console: Console, document: dict[str, Any], open_ends: list[str]) -> None:
    first, second = _names(document)
    changes = [
        f"mean {name} {number(document['overall']['first'][name])} -> {number(document['overall']['second'][name])}"
        for name in COMPARED
    ]
    console.print(f"{first} -> {second}, all samples: {', '.join(changes)}", markup=False)
    if not document["prompts"]:
        console.print(_nothing_shared(document, open_ends), markup=False)
    elif open_ends:
        last = "lie furthest apart" if document["first_run"] == document["second_run"] else "are the latest"
        others = f"{' and '.join(open_ends)} {'choose others' if len(open_ends) > 1 else 'chooses another'}"
        console.print(f"(chosen since they share the most prompts and {last} of those that do; {others})", markup=False)


def _nothing_shared(document: dict[str, Any], open_ends: list[str]) -> str:
    """Why no prompt is in both, and what to try; open_ends: options that the user left to be chosen."""
    if document["first_run"] != document["second_run"]:
        text = "no prompt is in both iterations"
    else:
        text = (
            "no prompt is in both: as long as a run has not taken every row of its data, none comes twice; "
            "--other RUN compares with another run"
        )
    if not open_ends:
        return text
    return (
        f"{text}; looked at were the first {LOOKED_AT} and the last {LOOKED_AT} iterations: "
        f"{' and '.join(open_ends)} can name any other"
    )


def _show_prompts(console: Console, document: dict[str, Any]) -> None:
    first, second = _names(document)
    rows = [
        (
            str(prompt["prompt_id"]),
            *(number(prompt[side]["mean"]["reward"]) for side in ("first", "second")),
            number(prompt["change"]["reward"]),
            *(number(prompt[side]["mean"]["length"]) for side in ("first", "second")),
            shorten(prompt["prompt_text"]),
        )
        for prompt in document["prompts"]
    ]
    header = (
        "prompt_id",
        _title("reward", first),
        _title("reward", second),
        "change",
        _title("length", first),
        _title("length", second),
        "prompt",
    )
    print_table(console, header, rows, num_right=6)
    console.print(
        f"{len(rows)} prompts in both, {document['only_first']} only in {first}, "
        f"{document['only_second']} only in {second}",
        markup=False,
    )


def _title(column: str, name: str) -> str:
    """Of a column, in lines: a run's name is long."""
    return "\n".join((column, *name.split(" of ", 1)))


def _cell(row: dict[str, Any]) -> str:
    return f"reward {number(row.get('reward'))}, {row['length']} tokens\n{printable(str(row.get('text', '')))}\n"
