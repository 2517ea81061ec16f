from __future__ import annotations

import pytest

from configs.deployment_checks import deployment_problems, is_cron
from configs.schema import RunConfig


@pytest.mark.parametrize(
    "text", ["0 2 * * *", "*/5 * * * *", "0 6 * * 0", "30 4 1,15 jan-jun mon-fri", "0 0-23/2 * * 7"]
)
def test_cron_fields(text: str) -> None:
    assert is_cron(text)


@pytest.mark.parametrize(
    "text",
    ["", "0 2 * *", "0 24 * * *", "60 * * * *", "* * 0 * *", "a * * * *", "*/0 * * * *", "@daily", "0 2 * * * *",
     "1- * * * *", "9999999999 * * * *", "٣ * * * *"],
)  # fmt: skip
def test_no_cron_fields(text: str) -> None:
    assert not is_cron(text)


def test_a_cron_that_we_take_is_one_for_prefect() -> None:
    from prefect.schedules import Cron

    for text in ("30 4 1,15 jan-jun mon-fri", "0 0-23/2 * * 7", "*/5 * * * *"):
        assert Cron(text, timezone="Europe/Berlin").cron == text


def test_an_unknown_time_zone_is_one_line() -> None:
    config = RunConfig.model_validate({"deployment": {"cron": "0 2 * * *", "timezone": "Europe/Atlantis"}})
    (problem,) = deployment_problems(config)
    assert problem.startswith("deployment.timezone: there is no time zone 'Europe/Atlantis'")
