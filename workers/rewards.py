"""Programmatic rewards: user functions scored one sample at a time in a process that can be killed."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from configs.errors import UserError
from configs.schema import RewardFunctionConfig, RunConfig
from pipeline.rollouts import Array
from workers.reward_child import ChildDied, ChildTimeout, RewardChild
from workers.reward_paths import function_name
from workers.reward_process import SCORE

logger = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """A reward function failed on a sample and its `on_error` is abort."""

    def __init__(self, function: str, sample: int, cause: str) -> None:
        super().__init__(function, sample, cause)
        self.function, self.sample, self.cause = function, sample, cause

    def __str__(self) -> str:
        return f"reward function {self.function!r} failed on sample {self.sample}: {self.cause}"


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
    NaN on samples without one; they are recorded, not rewarded. errors: number of (sample, function)
    pairs that scored 0 because the function failed.
    """

    parts: Mapping[str, Array]
    total: Array
    details: Mapping[str, Array] = field(default_factory=dict)
    errors: int = 0


class RewardFunctions:
    """The configured functions, in a child process that is started at the first use and kept.

    Samples are scored in order, function by function. A sample that exceeds its `timeout_s` costs the
    child, which is started anew for the next one. Usable from any thread, by one at a time. Raises
    UserError for a path or options that do not fit (at the first use; `check_reward_functions` asks
    earlier), RewardError for a failing sample under `on_error: abort`.
    """

    def __init__(self, functions: Sequence[RewardFunctionConfig]) -> None:
        self._functions = tuple(functions)
        self.names = reward_names(functions)
        self._child: RewardChild | None = None
        self._lock = threading.Lock()

    def score(self, samples: Sequence[RewardSample]) -> RewardScores:
        """Score B samples, 0 included. Raises ValueError for an answer that is no JSON."""
        answers = [_answer(sample, index) for index, sample in enumerate(samples)]
        parts, details, errors = {}, _Details(len(samples)), 0
        with self._lock:
            for index, name in enumerate(self.names):
                parts[name] = np.zeros(len(samples), dtype=np.float32)
                for row, (sample, answer) in enumerate(zip(samples, answers, strict=True)):
                    result = self._score_one(index, row, sample, answer)
                    errors += result is None
                    for part, value in (result or {SCORE: 0.0}).items():
                        if part == SCORE:
                            parts[name][row] = value
                        else:
                            details.add(f"{name}/{part}", row, value)
        total = np.zeros(len(samples), dtype=np.float32)
        for name, function in zip(self.names, self._functions, strict=True):
            total += np.float32(function.weight) * parts[name]
        return RewardScores(parts=parts, total=total, details=details.columns, errors=errors)

    def check(self) -> None:
        """Import the functions now; raises UserError for the first that does not fit."""
        with self._lock:
            if self._functions:
                self._running()

    def close(self) -> None:
        """End the child process; a later `score` starts another."""
        with self._lock:
            self._kill()

    def __enter__(self) -> RewardFunctions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _score_one(self, index: int, row: int, sample: RewardSample, answer: Any) -> dict[str, float] | None:
        """The parts of one result; None when it failed and counts as 0."""
        function = self._functions[index]
        request = {"call": index, "prompt": sample.prompt, "response": sample.response, "answer": answer}
        child = self._running()
        try:
            reply = child.ask(request, function.timeout_s)
        except (ChildTimeout, ChildDied) as error:
            self._kill()
            reply = {"error": str(error)}
        if "error" not in reply:
            parts: dict[str, float] = reply["parts"]
            return parts
        failure = RewardError(self.names[index], row, reply["error"])
        logger.warning("%s\n%s", failure, reply.get("traceback", ""))
        if function.on_error == "abort":
            raise failure
        return None

    def _running(self) -> RewardChild:
        if self._child is None:
            self._child = RewardChild()
            with self._killed_on_error():
                problem = self._child.load([{"path": f.path, "options": f.options} for f in self._functions])
                if problem is not None:
                    index, reason = problem
                    raise UserError(_misfit(index, self._functions[index], reason))
        return self._child

    @contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        try:
            yield
        except (ChildTimeout, ChildDied) as error:
            self._kill()
            paths = ", ".join(function.path for function in self._functions)
            raise UserError(f"rewards.functions ({paths}): importing them failed: {error}") from error
        except UserError:
            self._kill()
            raise

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


class _Details:
    """Columns that appear as functions name them."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self.columns: dict[str, Array] = {}

    def add(self, name: str, row: int, value: float) -> None:
        if name not in self.columns:
            self.columns[name] = np.full(self._num_samples, np.nan, dtype=np.float32)
        self.columns[name][row] = value


def reward_names(functions: Sequence[RewardFunctionConfig]) -> tuple[str, ...]:
    """Names of the parts. Raises UserError when two functions have the same."""
    names = tuple(function.name or function_name(function.path) for function in functions)
    for index, name in enumerate(names):
        if name in names[:index]:
            raise UserError(
                f"rewards.functions[{index}]: the name {name!r} is taken by functions[{names.index(name)}]; set `name`"
            )
    return names


def check_reward_functions(config: RunConfig) -> None:
    """Import every configured function once, in a process that ends here; takes about 0.1 s and its imports.

    Raises UserError, one line with the place in the configuration.
    """
    with RewardFunctions(config.rewards.functions) as functions:
        functions.check()


def _misfit(index: int, function: RewardFunctionConfig, reason: str) -> str:
    return f"rewards.functions[{index}].path {function.path!r}: {reason}"


def _answer(sample: RewardSample, index: int) -> Any:
    try:
        return json.loads(sample.answer) if sample.answer else None
    except json.JSONDecodeError as error:
        raise ValueError(f"sample {index}: the answer {sample.answer[:60]!r} is not JSON: {error}") from error
