"""What is retried, and what is not, by the class of the error."""

from __future__ import annotations

from typing import get_args

import pytest

from configs.errors import UserError
from flows.recovery import MAX_RECOVERIES, Recoveries
from workers.data_plane import ColumnsLost
from workers.engines.base import EngineError
from workers.engines.sglang.engine import failure
from workers.envelope import OutOfMemory, RankError, RanksLost, TrainingDiverged, classify
from workers.remedies import REMEDIES, ErrorClass

ERRORS: list[tuple[Exception, ErrorClass]] = [
    (
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]"),
        "lost",
    ),
    (ColumnsLost("values of iteration 3"), "lost"),
    (EngineError("the launcher ended"), "engine"),
    (failure("start", "ModuleNotFoundError: No module named 'sgl_kernel'; log: e.log"), "start"),
    (failure("start", "it ended during start (exit code 1); ValueError: unknown backend; log: e.log"), "start"),
    (failure("start", "start: not done within 9 s (it had to be killed); ImportError: x; log: e.log"), "engine"),
    (failure("start", "ValueError: Not enough memory; log: e.log"), "engine"),
    (failure("start", "OSError: [Errno 98] Address already in use; log: e.log"), "engine"),
    (failure("generate", "ValueError: a request; log: e.log"), "engine"),
    (UserError("data.train.path: no such file"), "user"),
    (OutOfMemory("out of memory on cuda:0"), "memory"),
    (MemoryError(), "memory"),
    (TrainingDiverged("4 steps"), "diverged"),
    (ZeroDivisionError("a bug"), "internal"),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS)
def test_errors_have_a_class(error: Exception, expected: ErrorClass) -> None:
    assert classify(error) == expected


def test_every_class_has_a_row_and_only_what_may_pass_is_retried() -> None:
    assert set(REMEDIES) == set(get_args(ErrorClass))
    assert {name for name, remedy in REMEDIES.items() if remedy.retry} == {"lost", "timeout", "engine"}


@pytest.mark.parametrize("error_class", get_args(ErrorClass))
def test_a_rebuild_follows_the_table(error_class: ErrorClass) -> None:
    recoveries, error = Recoveries(lambda _: None), RankError("x", error_class=error_class)
    if REMEDIES[error_class].retry:
        recoveries.begin(error, step=0)
    else:
        with pytest.raises(RankError):
            recoveries.begin(error, step=0)


def test_rebuilds_without_a_new_checkpoint_come_to_an_end() -> None:
    recoveries = Recoveries(lambda _: None)
    for step in (0, 4):
        for _ in range(MAX_RECOVERIES):
            recoveries.begin(RanksLost("rank 1 was lost in x"), step=step)
    with pytest.raises(RanksLost):
        recoveries.begin(RanksLost("rank 1 was lost in x"), step=4)


def test_a_recovery_is_over_at_the_first_stage_that_is_new() -> None:
    said: list[str] = []
    recoveries = Recoveries(said.append)
    recoveries.ended("critic.update_critic[2]")
    recoveries.begin(RanksLost("rank 1 was lost in critic.update_critic[3]"), step=2)
    recoveries.started("critic.update_critic[2]", iteration=2, updates=True)
    assert said == []
    recoveries.started("critic.update_critic[3]", iteration=3, updates=True)
    (line,) = said
    assert line.startswith(
        "rank 1 was lost in critic.update_critic[3]; recovered from checkpoint 2, replayed 1 iteration, "
    )
