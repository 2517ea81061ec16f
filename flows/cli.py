"""The command line. Commands import what they do when they run: `--help` loads neither torch nor Prefect.

Exit codes: 0 ok; 1 the run failed; 2 a mistake of the user (one line on stderr); 130 stopped by
Ctrl-C or SIGTERM, can be resumed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from configs.errors import UserError, one_line
from configs.paths import working_directory
from flows.cli_options import RUNS, Config, Configs, Json, Overrides, Run, Runs
from flows.cli_options import finish as _finish
from flows.cli_rollouts import rollouts_app
from flows.commands.answer import FAILED, OK, STOPPED, USER_ERROR, Answer, deliver
from flows.standard_streams import OutputError, open_closed_streams
from workers.envelope import RankError
from workers.remedies import REMEDIES

EPILOG = (
    "Exit codes: 0 ok, 1 the run failed, 2 a mistake in what you gave (one line says which), "
    "130 stopped by Ctrl-C or SIGTERM (go on with `hybridflow resume RUN`)."
)

MOST_SHOWN = 10
"""Lines of one command's mistakes on a terminal."""

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What Typer raises for wrong options; its home differs between Typer's versions."""

app = typer.Typer(
    name="hybridflow",
    help="RLHF on Prefect, Dask, torch FSDP2 and SGLang.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(no_args_is_help=True, help="Look at configurations.")
checkpoints_app = typer.Typer(no_args_is_help=True, help="List and export the checkpoints of a run.")
app.add_typer(config_app, name="config")
app.add_typer(rollouts_app, name="rollouts")
app.add_typer(checkpoints_app, name="checkpoints")


def main(args: Sequence[str] | None = None) -> int:
    """The exit code. A mistake of the user is one line on stderr; any other error keeps its traceback."""
    open_closed_streams()
    command = typer.main.get_command(app)
    # A user's own modules are found, and shadow nothing: an editable install's finder comes after every folder
    # on the path, so its root goes before the working directory. Dask workers get this path too.
    try:
        for place in (str(Path(__file__).resolve().parent.parent), working_directory()):
            if place not in sys.path:
                sys.path.append(place)
        code = command.main(args=None if args is None else list(args), prog_name="hybridflow", standalone_mode=False)
    except OutputError as error:
        _complain(str(error))
        return FAILED
    except UserError as error:
        return _complain_of(error)
    except RankError as error:
        advice = "" if error.error_class == "memory" else f"; {REMEDIES[error.error_class].advice}"
        _complain(f"the run failed: {error}{advice}; what is committed is kept{_notes(error)}")
        return FAILED
    except UsageError as error:
        return _usage_error(error, given=sys.argv[1:] if args is None else args)
    except typer.Abort:
        return STOPPED
    return code if isinstance(code, int) else OK


def _complain_of(error: UserError) -> int:
    """A mistake in a line; of several, the first MOST_SHOWN."""
    lines = list(error.problems) or [str(error)]
    for line in lines[:MOST_SHOWN]:
        _complain(f"{line}{_notes(error)}")
    if len(lines) > MOST_SHOWN:
        _complain(f"{len(lines) - MOST_SHOWN} more of them; --json prints all")
    return USER_ERROR


def _notes(error: Exception) -> str:
    """Where the run's log is, if a run had begun."""
    return "".join(f"; {note}" for note in getattr(error, "__notes__", ()))


def _complain(message: str) -> int:
    print(f"hybridflow: {one_line(message)}", file=sys.stderr)
    return USER_ERROR


def _usage_error(error: Exception, *, given: Sequence[str]) -> int:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if not message.strip():  # a group without a command: its help is printed already
        return USER_ERROR
    line = f"{str(message).strip().rstrip('.')}; see --help"
    if "--json" in given:
        import json

        print(json.dumps({"error": line, "exit_code": USER_ERROR}))
    return _complain(line)


def _print_version(wanted: bool) -> None:
    if wanted:
        from flows.version import version

        typer.echo(f"hybridflow {version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog=EPILOG)
def quickstart(
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Parent of the run directories.")] = Path(
        RUNS
    ),
    json: Json = False,
) -> None:
    """Train a small model from scratch: SFT, a reward model, then PPO. Minutes on two CPU cores."""
    from flows.commands import run as commands

    _finish(deliver(lambda: commands.quickstart(output, quiet=json), as_json=json))


@app.command(epilog=EPILOG)
def run(
    config: Config,
    overrides: Overrides = None,
    output: Annotated[
        str | None,
        typer.Option("--output", metavar="DIR", help="Parent of the run directory (sets `output`), or an s3:// URL."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, say what would run, and stop.")] = False,
    json: Json = False,
) -> None:
    """Run a configuration. Ctrl-C stops at the next stage boundary; a second one at once."""
    from flows.commands import run as commands

    _finish(deliver(lambda: commands.run(config, overrides or (), output, dry_run=dry_run, quiet=json), as_json=json))


@app.command(epilog=EPILOG)
def resume(run: Run, overrides: Overrides = None, runs: Runs = RUNS, json: Json = False) -> None:
    """Go on with a run that was stopped, killed, or given more iterations with --set."""
    from flows.commands import run as commands

    _finish(deliver(lambda: commands.resume(run, overrides or (), runs, quiet=json), as_json=json))


@app.command()
def replay(
    run: Run,
    iteration: Annotated[int, typer.Option("--iteration", "-i", min=0, help="Which iteration.")],
    stage: Annotated[
        str,
        typer.Option("--stage", metavar="STAGE", help="As in `update_actor`, or `actor.compute_log_prob`."),
    ],
    overrides: Overrides = None,
    runs: Runs = RUNS,
    json: Json = False,
) -> None:
    """Run a stored stage again: the same bit for bit, or where not; with --set, what if. The run stays untouched."""
    from flows.commands.replay import replay as command

    def work() -> Answer:
        return command(run, runs, iteration=iteration, stage=stage, overrides=overrides or (), quiet=json)

    _finish(deliver(work, as_json=json))


@app.command(epilog=EPILOG)
def evaluate(
    config: Config,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="RUN|PATH",
            help="A run (RUN@STEP: one of its checkpoints), a checkpoint's folder, or a Hugging Face directory; "
            "the configured actor if not given.",
        ),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset",
            metavar="NAME=PATH",
            help="Held-out rows in place of the configured ones (NAME=SOURCE:PATH for another source). Repeatable.",
        ),
    ] = None,
    overrides: Overrides = None,
    output: Annotated[
        str | None,
        typer.Option("--output", metavar="DIR", help="Parent of the evaluation's directory (sets `output`)."),
    ] = None,
    runs: Runs = RUNS,
    json: Json = False,
) -> None:
    """Evaluate a model on held-out data: mean@n, pass@k, best@k, maj@n with intervals. Nothing is trained."""
    from flows.commands.evaluate import evaluate as command

    _finish(
        deliver(
            lambda: command(
                config,
                overrides or (),
                checkpoint=checkpoint,
                datasets=dataset or (),
                runs=runs,
                output=output,
                quiet=json,
            ),
            as_json=json,
        )
    )


@app.command()
def status(run: Run, runs: Runs = RUNS, json: Json = False) -> None:
    """Say what a run is doing: ranks, models, phases, memory, the last iterations, the expected end."""
    from flows.commands.status import status as command

    _finish(deliver(lambda: command(run, runs), as_json=json))


@app.command()
def timeline(
    run: Run,
    iteration: Annotated[int | None, typer.Option("--iteration", "-i", min=0, help="The last if not given.")] = None,
    output: Annotated[Path | None, typer.Option("--output", metavar="DIR", help="Instead of the run's plots/.")] = None,
    runs: Runs = RUNS,
    json: Json = False,
) -> None:
    """Write when each rank ran which stage: a Chrome trace and a picture."""
    from flows.commands.timeline import timeline as command

    _finish(deliver(lambda: command(run, runs, iteration=iteration, output=output), as_json=json))


@app.command()
def report(
    run: Run,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Instead of RUN/report.html.")] = None,
    max_iterations: Annotated[
        int, typer.Option("--max-iterations", min=1, max=1000, help="Take samples of at most so many iterations.")
    ] = 24,
    per_iteration: Annotated[int, typer.Option("--samples", min=1, max=1000, help="Samples of each of them.")] = 12,
    runs: Runs = RUNS,
    json: Json = False,
) -> None:
    """Write a run as one HTML page: metrics, best and worst samples, token heat-maps, search. Needs no network."""
    from flows.commands.report import report as command

    def work() -> Answer:
        return command(run, runs, output=output, max_iterations=max_iterations, per_iteration=per_iteration)

    _finish(deliver(work, as_json=json))


@app.command()
def ui(runs: Runs = RUNS, json: Json = False) -> None:
    """Serve the Prefect UI of the runs in a folder until Ctrl-C."""

    def start() -> Answer:
        from flows.commands.ui import ui as command
        from storage.locations import location

        return command(location(runs))

    _finish(deliver(start, as_json=json))


@app.command(epilog=EPILOG)
def serve(configs: Configs, overrides: Overrides = None, json: Json = False) -> None:
    """Run configurations when they are due or asked for, one at a time, until Ctrl-C."""
    from flows.commands.deploy import serve as command

    _finish(deliver(lambda: command(configs, overrides or ()), as_json=json))


@app.command()
def deploy(
    configs: Configs,
    overrides: Overrides = None,
    init: Annotated[bool, typer.Option("--init", help="Write prefect.yaml instead of registering anything.")] = False,
    json: Json = False,
) -> None:
    """Put configurations on the Prefect server of PREFECT_API_URL, for workers to run."""
    from flows.commands.deploy import deploy as command

    _finish(deliver(lambda: command(configs, overrides or (), init=init), as_json=json))


@app.command()
def doctor(json: Json = False) -> None:
    """Say what this machine can do. Exits 0 when CPU runs work, else 1."""
    from flows.commands.doctor import doctor as command

    _finish(deliver(command, as_json=json))


@config_app.command("check")
def config_check(config: Config, overrides: Overrides = None, json: Json = False) -> None:
    """Look for what would stop a run before it starts (no model is loaded); exits 2 when there is such a mistake."""
    from flows.commands import config as commands

    _finish(deliver(lambda: commands.check(config, overrides or ()), as_json=json))


@config_app.command("show")
def config_show(config: Config, overrides: Overrides = None, json: Json = False) -> None:
    """Print every value after defaults, file and overrides."""
    from flows.commands import config as commands

    _finish(deliver(lambda: commands.show(config, overrides or ()), as_json=json))


@config_app.command("schema")
def config_schema(json: Json = False) -> None:
    """Print the JSON schema of configuration files."""
    from flows.commands import config as commands

    _finish(deliver(commands.schema, as_json=json))


@checkpoints_app.command("ls")
def checkpoints_ls(run: Run, runs: Runs = RUNS, json: Json = False) -> None:
    """List committed checkpoints."""
    from flows.commands import checkpoints as commands

    _finish(deliver(lambda: commands.ls(run, runs), as_json=json))


@checkpoints_app.command("export")
def checkpoints_export(
    run: Run,
    destination: Annotated[Path, typer.Argument(metavar="DIR", help="An empty or new folder.")],
    step: Annotated[int | None, typer.Option("--step", help="Which checkpoint; the latest if not given.")] = None,
    role: Annotated[
        str | None,
        typer.Option("--role", help="Which model; actor (reward-model runs: reward) if not given."),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The checkpoint that `checkpoint.best_metric` judges best.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option("--dtype", help="bfloat16 halves the files.")
    ] = "float32",
    runs: Runs = RUNS,
    json: Json = False,
) -> None:
    """Write a model of a checkpoint as a Hugging Face directory."""
    from flows.commands import checkpoints as commands

    _finish(
        deliver(
            lambda: commands.export(run, runs, destination, step=step, role=role, best=best, dtype=dtype), as_json=json
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
