"""`hybridflow rollouts ...`: options of the commands; flows/commands/rollouts*.py does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli_options import RUNS, Json, Run, Runs, finish
from flows.commands.answer import Answer, deliver

rollouts_app = typer.Typer(no_args_is_help=True, help="Look at the rollouts of a run.")
Iterations = Annotated[
    str | None,
    typer.Option("--iterations", metavar="N|FIRST:END", help="Only these: 7, 3:10 (without 10), 5:, -1 (the last)."),
]
Where = Annotated[
    str | None,
    typer.Option("--where", metavar="EXPR", help='Only rows like: reward < 0 and (length > 100 or text ~ "sorry").'),
]
Column = Annotated[
    list[str] | None, typer.Option("--column", "-c", metavar="NAME", help="Only this column. Repeatable.")
]


@rollouts_app.command("ls")
def ls(run: Run, runs: Runs = RUNS, json: Json = False) -> None:
    """List iterations: committed stages, rows, tokens, mean reward."""
    from flows.commands import rollouts as commands

    finish(deliver(lambda: commands.ls(run, runs), as_json=json))


@rollouts_app.command("show")
def show(
    run: Run,
    iteration: Annotated[
        int, typer.Option("--iteration", "-i", help="Which iteration, from 0; -1 is the last, as without it.")
    ] = -1,
    prompt: Annotated[int | None, typer.Option("--prompt", "-p", help="Only this prompt, from 0.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="A row for every response token.")] = False,
    color: Annotated[
        str | None,
        typer.Option("--color", metavar="COLUMN", help="Colour tokens by advantages, log_prob_gap or another column."),
    ] = None,
    side_by_side: Annotated[bool, typer.Option("--side-by-side", help="The samples of a prompt in columns.")] = False,
    where: Where = None,
    runs: Runs = RUNS,
    json: Json = False,
) -> None:
    """Show samples: text, rewards, and with --json or --tokens every token's columns."""
    from flows.commands import rollouts as commands

    look = commands.Look(tokens=tokens, color=color, side_by_side=side_by_side)
    finish(
        deliver(
            lambda: commands.show(run, runs, iteration=iteration, prompt=prompt, where=where, look=look), as_json=json
        )
    )


@rollouts_app.command("grep")
def grep(
    run: Run,
    pattern: Annotated[str, typer.Argument(metavar="PATTERN", help="A regular expression; '' is in every text.")],
    column: Annotated[str, typer.Option("--in", metavar="COLUMN", help="Which text: text, prompt_text, ...")] = "text",
    where: Where = None,
    iterations: Iterations = None,
    ignore_case: Annotated[bool, typer.Option("--ignore-case", "-I", help="Upper and lower case alike.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Show at most so many; 0: all.")] = 50,
    count: Annotated[bool, typer.Option("--count", help="Only say how many match.")] = False,
    runs: Runs = RUNS,
    json: Json = False,
) -> None:
    """Find samples by their text and any other column."""
    from flows.commands.rollout_queries import Selection
    from flows.commands.rollout_queries import grep as command

    def work() -> Answer:
        selection = Selection.of(run, runs, iterations=iterations, where=where)
        return command(selection, pattern, column=column, ignore_case=ignore_case, limit=limit, count=count)

    finish(deliver(work, as_json=json))


@rollouts_app.command("stats")
def stats(
    run: Run,
    columns: Column = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="COLUMN", help="Apart for each value: iteration, finish_reason, ...")
    ] = None,
    where: Where = None,
    iterations: Iterations = None,
    runs: Runs = RUNS,
    json: Json = False,
) -> None:
    """Mean, spread and quantiles of sample columns (rewards, lengths, ...)."""
    from flows.commands.rollout_queries import Selection
    from flows.commands.rollout_queries import stats as command

    def work() -> Answer:
        selection = Selection.of(run, runs, iterations=iterations, where=where)
        return command(selection, columns=columns or [], by=by)

    finish(deliver(work, as_json=json))


@rollouts_app.command("diff")
def diff(
    run: Run,
    first: Annotated[
        str | None,
        typer.Option(
            "--first", metavar="N", help="An iteration; of those that share prompts with the second, the earliest."
        ),
    ] = None,
    second: Annotated[
        str | None,
        typer.Option(
            "--second", metavar="N", help="Another one; -1 is the last. The last that has a first if not given."
        ),
    ] = None,
    other: Annotated[str | None, typer.Option("--other", metavar="RUN", help="The second one is of this run.")] = None,
    prompt_id: Annotated[int | None, typer.Option("--prompt-id", help="This prompt's samples side by side.")] = None,
    runs: Runs = RUNS,
    json: Json = False,
) -> None:
    """Compare two iterations on the prompts that both have: those furthest apart that share the most, unless told."""
    from flows.commands.rollout_diff import diff as command

    finish(
        deliver(lambda: command(run, runs, first=first, second=second, other=other, prompt_id=prompt_id), as_json=json)
    )


@rollouts_app.command("export")
def export(
    run: Run,
    destination: Annotated[Path, typer.Argument(metavar="FILE", help="Ends in .parquet or .jsonl.")],
    columns: Column = None,
    where: Where = None,
    iterations: Iterations = None,
    runs: Runs = RUNS,
    json: Json = False,
) -> None:
    """Write samples as Parquet or JSON lines, which `datasets` opens."""
    from flows.commands.rollout_queries import Selection
    from flows.commands.rollout_queries import export as command

    def work() -> Answer:
        selection = Selection.of(run, runs, iterations=iterations, where=where)
        return command(selection, destination, columns=columns or [])

    finish(deliver(work, as_json=json))
