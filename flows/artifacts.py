"""One Prefect artifact per iteration: a page of markdown under the configuration's key, with its history.

Prefect's interface renders markdown with HTML. What a model wrote goes into a code fence that is longer
than any fence in it, so that it stays text.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

MAX_SAMPLE_CHARACTERS = 2000
PUBLISH_TIMEOUT_S = 10.0
_reported_runs: set[str] = set()


async def publish_iteration(
    name: str,
    run_name: str,
    iteration: int,
    metrics: Mapping[str, Any],
    stage_seconds: Mapping[str, float],
    best: str,
    worst: str,
    *,
    warnings: Sequence[str] = (),
) -> None:
    """Publish the iteration's artifact from inside a flow or task run.

    name: the configuration's, of which the key is made: the key's history is of all iterations of all its runs.
    """
    from prefect.artifacts import MarkdownArtifact

    artifact = MarkdownArtifact(
        key=artifact_key(name, "iterations"),
        description=f"Iteration {iteration} of {one_line(run_name)}",
        markdown=iteration_markdown(run_name, iteration, metrics, stage_seconds, best, worst, warnings=warnings),
    )
    await reaching_server(run_name, f"iteration {iteration}", artifact.acreate())


async def reaching_server(run_name: str, what: str, request: Awaitable[object]) -> None:
    """Await a request to the Prefect server that never fails the run: the first failure of a run to reach the
    server is logged with its cause."""
    import httpx

    try:
        async with asyncio.timeout(PUBLISH_TIMEOUT_S):
            await request
    except (httpx.HTTPError, OSError) as error:  # OSError: no connection, and asyncio's time-out
        _report_once(run_name, what, error)


def _report_once(run_name: str, what: str, error: Exception) -> None:
    if run_name in _reported_runs:
        return
    _reported_runs.add(run_name)
    logger.warning(
        "no Prefect artifact for %s of %s, nor a word about further ones: %s: %s",
        what,
        run_name,
        type(error).__name__,
        error or f"no answer within {PUBLISH_TIMEOUT_S:g} s",
    )


def artifact_key(name: str, kind: str) -> str:
    """`NAME-KIND`, the same in every run of a configuration; lowercase letters, digits, dashes, as Prefect asks."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"{slug or 'run'}-{kind}"


def iteration_markdown(
    run_name: str,
    iteration: int,
    metrics: Mapping[str, Any],
    stage_seconds: Mapping[str, float],
    best: str,
    worst: str,
    *,
    warnings: Sequence[str] = (),
) -> str:
    """The page: warnings, metrics, seconds of each stage, best and worst sample (left out where empty)."""
    total = sum(stage_seconds.values())
    stages = [(name, f"{s:.3f}", f"{s / total:.0%}" if total else "") for name, s in stage_seconds.items()]
    parts = [
        f"# {one_line(run_name)}, iteration {iteration}",
        *(f"**Warning:** {one_line(warning)}" for warning in warnings),
        table(("metric", "value"), [(name, number(value)) for name, value in sorted(metrics.items())]),
        table(("stage", "seconds", "share"), stages),
    ]
    parts += [f"## {title} sample\n\n{fenced(text)}" for title, text in (("Best", best), ("Worst", worst)) if text]
    return "\n\n".join(parts) + "\n"


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A markdown table; cells are escaped."""
    lines = [header, tuple("---" for _ in header), *(tuple(one_line(cell) for cell in row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: object) -> str:
    """A metric's value with five significant digits."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def one_line(text: str) -> str:
    """Text for a heading or a table cell: markdown's and HTML's characters lose their meaning."""
    return re.sub(r"([\\`*_{}\[\]<>#|&~!$])", r"\\\1", " ".join(printable(text).split()))


def fenced(text: str) -> str:
    """Text as a code block, cut to MAX_SAMPLE_CHARACTERS."""
    text = printable(text)
    if len(text) > MAX_SAMPLE_CHARACTERS:
        text = f"{text[:MAX_SAMPLE_CHARACTERS]}… ({len(text) - MAX_SAMPLE_CHARACTERS} more characters)"
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def printable(text: str) -> str:
    """Control characters and lone surrogates written as escapes; new lines and tabs stay."""
    return "".join(
        c if c in "\n\t" or c.isprintable() or (c.isspace() and ord(c) > 0x9F) else ascii(c)[1:-1]
        for c in text.replace("\r\n", "\n")
    )
