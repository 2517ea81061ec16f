"""Programmatic rewards: functions scored many at once, in processes that can be killed."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from configs.data_files import answers_that_are_no_text
from configs.errors import UserError, refuse, shown
from configs.schema import RewardFunctionConfig, RunConfig
from pipeline.rollouts import Array
from workers.reward_calls import SCORE
from workers.reward_paths import function_name
from workers.reward_pool import Job, RewardPool, Scored

logger = logging.getLogger(__name__)
MAX_PROCESSES = 16
LOGGED_FAILURES = 5
"""Failures of one call that are logged with their tracebacks; the rest are counted."""


class RewardError(RuntimeError):
    """A reward function failed on a sample and its `on_error` is abort."""

    def __init__(self, function: str, sample: int, cause: str, prompt: str = "") -> None:
        super().__init__(function, sample, cause, prompt)
        self.function, self.sample, self.cause, self.prompt = function, sample, cause, prompt

    def __str__(self) -> str:
        prompt = shown(self.prompt)
        return f"reward function {self.function!r} failed on sample {self.sample} (prompt {prompt}): {self.cause}"


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """What is scored. answer: the data set's value as JSON text, "" where there is none."""

    prompt: str
    response: str
    answer: str = ""


@dataclass(frozen=True, kw_only=True)
class RewardScores:
    """parts: float32 [B] by function. total: float32 [B], their weighted sum.

    details: float32 [B] for the further entries of functions that return a dict, named `FUNCTION/ENTRY`,
    NaN on samples without one; they are recorded, not rewarded. failed: bool [B] by function, the samples
    that it failed on for good; their part is 0. dropped: bool [B], failed under `on_error: drop_group`.
    retries: how often a sample was scored again. extracted: text or None [B], the answers that a function read,
    by the functions that say so.
    """

    parts: Mapping[str, Array]
    total: Array
    dropped: Array
    details: Mapping[str, Array] = field(default_factory=dict)
    failed: Mapping[str, Array] = field(default_factory=dict)
    retries: int = 0
    extracted: Mapping[str, Array] = field(default_factory=dict)

    @property
    def errors(self) -> int:
        """Number of (sample, function) pairs that failed for good."""
        return sum(int(failed.sum()) for failed in self.failed.values())


class RewardFunctions:
    """The configured functions, in child processes that are started at the first use and kept.

    num_processes: None: by this machine's cores. place: the functions' key in the configuration, for messages.
    Results never depend on the number of processes nor on timing. A sample that exceeds its `timeout_s` costs
    its process, which is started anew for the next one. Usable from any thread, by one at a time. Raises
    UserError for a path or options that do not fit (at the first use; `check_reward_functions` asks
    earlier), RewardError for the first failing sample under `on_error: abort`.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunctionConfig],
        *,
        num_processes: int | None = None,
        place: str = "rewards.functions",
    ) -> None:
        self._functions = tuple(functions)
        self.names = reward_names(functions, place=place)
        self.num_processes = num_processes or default_processes(1)
        self._pool = RewardPool(self._functions, num_processes=self.num_processes, place=place)
        self._lock = threading.Lock()

    def score(self, samples: Sequence[RewardSample]) -> RewardScores:
        """Score B samples, 0 included. Raises ValueError for an answer that is no JSON."""
        asked = [(s.prompt, s.response, _answer(s, index)) for index, s in enumerate(samples)]
        table = _Table(self.names, len(samples))
        with self._lock:
            if not self._functions:
                return table.scores({}, dropping=())
            self._pool.start()
            jobs = self._pool.jobs(asked)
            results = self._pool.run(jobs, stops=self._aborts)
        for job, scored in zip(jobs, results, strict=True):
            if scored is None:
                break
            self._record(table, job, scored)
        weights = {name: f.weight for name, f in zip(self.names, self._functions, strict=True)}
        dropping = [n for n, f in zip(self.names, self._functions, strict=True) if f.on_error == "drop_group"]
        return table.scores(weights, dropping=dropping)

    def check(self) -> int | None:
        """Import the functions now; raises UserError for the first that does not fit. The number of the first that says
        that its answer is a text, if any does."""
        with self._lock:
            if self._functions:
                self._pool.start()
            return next((number for number, takes in enumerate(self._pool.texts) if takes), None)

    def close(self) -> None:
        """End the child processes; a later `score` starts others."""
        with self._lock:
            self._pool.close()

    def __enter__(self) -> RewardFunctions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _aborts(self, job: Job, scored: Sequence[Scored]) -> bool:
        return self._functions[job.call].on_error == "abort" and any(one.parts is None for one in scored)

    def _record(self, table: _Table, job: Job, scored: Sequence[Scored]) -> None:
        """Put a job's results into the table; raises RewardError for a failure that aborts."""
        name = self.names[job.call]
        for row, (prompt, _, _), one in zip(job.rows, job.samples, scored, strict=True):
            table.add(name, row, one)
            if one.parts is not None:
                continue
            failure = RewardError(name, row, one.error, prompt)
            if table.errors <= LOGGED_FAILURES:
                logger.warning("%s\n%s", failure, one.traceback)
            if self._functions[job.call].on_error == "abort":
                failure.add_note(one.traceback)  # travels with the error into the controller's log
                raise failure


class _Table:
    """The results by function and row, as they are put in."""

    def __init__(self, names: Sequence[str], num_samples: int) -> None:
        self._num_samples = num_samples
        self._parts = {name: np.zeros(num_samples, dtype=np.float32) for name in names}
        self._failed = {name: np.zeros(num_samples, dtype=bool) for name in names}
        self._details: dict[str, Array] = {}
        self._extracted: dict[str, Array] = {}
        self._retries = 0
        self.errors = 0

    def add(self, name: str, row: int, scored: Scored) -> None:
        self._retries += scored.retries
        if scored.parts is None:
            self._failed[name][row] = True
            self.errors += 1
        if scored.extracts:
            self._extracted.setdefault(name, np.full(self._num_samples, None, dtype=object))[row] = scored.extracted
        for part, value in (scored.parts or {}).items():
            column = self._parts[name] if part == SCORE else self._detail(f"{name}/{part}")
            column[row] = value

    def scores(self, weights: Mapping[str, float], *, dropping: Sequence[str]) -> RewardScores:
        total = np.zeros(self._num_samples, dtype=np.float32)
        for name, weight in weights.items():
            total += np.float32(weight) * self._parts[name]
        dropped = np.zeros(self._num_samples, dtype=bool)
        for name in dropping:
            dropped |= self._failed[name]
        return RewardScores(
            parts=self._parts,
            total=total,
            dropped=dropped,
            details=self._details,
            failed=self._failed,
            retries=self._retries,
            extracted=self._extracted,
        )

    def _detail(self, name: str) -> Array:
        if name not in self._details:
            self._details[name] = np.full(self._num_samples, np.nan, dtype=np.float32)
        return self._details[name]


def default_processes(num_ranks: int) -> int:
    """Reward processes of a rank where `num_ranks` may share this machine's cores."""
    return max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // max(num_ranks, 1)))


def reward_names(functions: Sequence[RewardFunctionConfig], *, place: str = "rewards.functions") -> tuple[str, ...]:
    """Names of the parts. Raises UserError when two functions have the same."""
    names = tuple(function.name or function_name(function.path) for function in functions)
    for index, name in enumerate(names):
        if name in names[:index]:
            raise UserError(f"{place}.{index}.name: {name!r} is taken by {place}.{names.index(name)}; set another")
    return names


def check_reward_functions(config: RunConfig) -> None:
    """Import every configured function once, in a process that ends here; takes about 0.1 s and its imports.

    Raises UserError, one line with the place in the configuration.
    """
    for section, scored in (("rewards", config.rewards), ("costs", config.costs)):
        with RewardFunctions(scored.functions, place=f"{section}.functions") as functions:
            number = functions.check()
        if number is not None:
            path = scored.functions[number].path
            refuse(
                f"{section}.functions.{number}.path: {path} says that its answer is a text (str), but {problem}; write "
                "texts there, or annotate the answer as what it is"
                for problem in islice(answers_that_are_no_text(config.data), 1)
            )


def _answer(sample: RewardSample, index: int) -> Any:
    try:
        return json.loads(sample.answer) if sample.answer else None
    except json.JSONDecodeError as error:
        raise ValueError(f"sample {index}: the answer {sample.answer[:60]!r} is not JSON: {error}") from error
