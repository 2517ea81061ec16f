"""report: a run as one page that any browser opens without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.errors import UserError
from flows.commands.answer import Answer
from flows.commands.named_run import named_run
from flows.commands.tables import counted, size
from flows.commands.tokenizers import tokenizer_folders
from storage.locations import Location
from storage.own_files import refuse_own_files
from storage.report import collect, default_path
from storage.report_page import write_page
from storage.run_needs import REPORT
from storage.token_text import TokenTexts


def report(
    name_or_path: str, runs: Location | str, *, output: Path | None, max_iterations: int, per_iteration: int
) -> Answer:
    """Write the page (RUN/report.html unless told otherwise)."""
    run = named_run(name_or_path, runs, REPORT)
    path = output or default_path(run)
    if output is not None:
        refuse_own_files(output, "--output ")
    if path.is_dir():
        raise UserError(f"--output {path}: is a folder; name a file")
    data = collect(run, TokenTexts(tokenizer_folders(run)), max_iterations=max_iterations, per_iteration=per_iteration)
    if not data["iterations"] and not data["samples"]:
        raise UserError(f"{run.path}: nothing to report, no iteration was logged or stored yet")
    num_bytes = write_page(path, data)
    document: dict[str, Any] = {
        "run": str(run.path),
        "page": str(path),
        "bytes": num_bytes,
        "iterations": len(data["iterations"]),
        "samples": len(data["samples"]),
    }
    said = (counted(document["iterations"], "iteration"), counted(document["samples"], "sample"), size(num_bytes))
    line = f"{path}: {', '.join(said)}"
    return Answer(document=document, show=lambda console: console.print(line, markup=False, soft_wrap=True))
