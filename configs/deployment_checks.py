"""Recurring runs: cron fields and time zones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from configs.errors import shown
from configs.schema import RunConfig

CRON_RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
"""Minute, hour, day of the month, month, day of the week (0 and 7: Sunday)."""
CRON_NAMES = (
    (), (), (),
    ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"),
    ("sun", "mon", "tue", "wed", "thu", "fri", "sat"),
)  # fmt: skip
CRON_PART = re.compile(r"(?:\*|(\w+)(?:-(\w+))?)(?:/(\d+))?")


def deployment_problems(config: RunConfig) -> Iterator[str]:
    """Schedules that no clock knows."""
    deployment = config.deployment
    for key, cron in (("cron", deployment.cron), ("evaluation_cron", deployment.evaluation_cron)):
        if cron is not None and not is_cron(cron):
            yield (
                f"deployment.{key}: {shown(cron)} is no schedule; give five fields, minute, hour, day of the month, "
                "month and day of the week, as in '0 2 * * *' for two o'clock every night"
            )
    if not _is_time_zone(deployment.timezone):
        yield f"deployment.timezone: there is no time zone {shown(deployment.timezone)}; name one, as Europe/Berlin"


def is_cron(text: str) -> bool:
    """Five fields of numbers (or names of months and days), ranges, lists and steps."""
    fields = text.split()
    return len(fields) == len(CRON_RANGES) and all(
        _is_part(part, place) for place, field in enumerate(fields) for part in field.lower().split(",")
    )


def _is_part(part: str, place: int) -> bool:
    match = CRON_PART.fullmatch(part)
    if match is None:
        return False
    first, last, step = match.groups()
    numbers = [_number(value, place) for value in (first, last) if value is not None]
    low, high = CRON_RANGES[place]
    in_range = all(n is not None and low <= n <= high for n in numbers)
    return in_range and (step is None or 0 < int(step) <= high)


def _number(value: str, place: int) -> int | None:
    if value in CRON_NAMES[place]:
        return CRON_NAMES[place].index(value) + CRON_RANGES[place][0]
    return int(value) if value.isascii() and value.isdecimal() and len(value) < 4 else None


def _is_time_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


def checkpoint_problems(config: RunConfig) -> Iterator[str]:
    """A best checkpoint by a metric that no checkpoint would have."""
    metric, every = config.checkpoint.best_metric, config.evaluation.every
    if metric is None or not metric.startswith("eval/"):
        return
    if every is None:
        yield (
            f"checkpoint.best_metric: {shown(metric)} is of the evaluation, and evaluation.every is null; "
            "set that, or name another metric"
        )
    elif config.checkpoint.every % every:
        yield (
            f"checkpoint.best_metric: {shown(metric)} is measured every {every} iterations (evaluation.every), so most "
            f"checkpoints would have none; set checkpoint.every to a multiple of {every}"
        )
