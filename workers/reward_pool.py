"""Many reward processes at once: who scores what, what a failure costs, and results in the order of the jobs.

    jobs, in order --> scorer 1 (a process) --+
                       scorer 2 (a process) --+--> results, by job and sample
                       ...

A job is one sample; a list, for a function that takes lists; or all samples, for a coroutine function.
When a process is lost, the samples that may be at fault are scored again one by one, so that each failure
is that of its own sample.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from configs.errors import UserError
from configs.schema import RewardFunctionConfig
from workers.json_child import ChildDied, ChildTimeout
from workers.reward_calls import EXTRACTED
from workers.reward_child import RewardChild

GRACE_S = 2.0
"""Coroutines keep their time limits themselves; a loop that is blocked for so much longer is killed."""

Sample = tuple[str, str, Any]
"""prompt, response, answer."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process is asked at once. call: number of the function. rows: of the samples."""

    call: int
    rows: tuple[int, ...]
    samples: tuple[Sample, ...]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One sample by one function: parts of its result, or the error that is left after `retries`.

    extracted: the answer that it read; None: none. extracts: whether it says so at all.
    """

    parts: dict[str, float] | None = None
    extracted: str | None = None
    extracts: bool = False
    error: str = ""
    traceback: str = ""
    retries: int = 0


class RewardScorer:
    """One reward process, started when it is needed and again after it was lost."""

    def __init__(self, functions: Sequence[RewardFunctionConfig], place: str) -> None:
        self._functions, self._place = functions, place
        self._child: RewardChild | None = None
        self.coroutines: tuple[bool, ...] = ()
        self.texts: tuple[bool, ...] = ()

    def start(self) -> None:
        """Start the process and import the functions; raises UserError for the first that does not fit."""
        if self._child is not None:
            return
        self._child = RewardChild()
        try:
            loaded = self._child.load([
                {"path": f.path, "options": f.options, "batched": f.batch_size is not None} for f in self._functions
            ])  # fmt: skip
        except (ChildTimeout, ChildDied) as error:
            self.close()
            paths = ", ".join(function.path for function in self._functions)
            raise UserError(f"{self._place} ({paths}): importing them failed: {error}") from error
        if loaded.problem is not None:
            self.close()
            index, reason = loaded.problem
            raise UserError(f"{self._place}.{index}.path: {self._functions[index].path!r}: {reason}")
        self.coroutines, self.texts = loaded.coroutines, loaded.texts

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def score(self, job: Job) -> list[Scored]:
        """Every sample of the job, after retries."""
        scored = [_scored(reply) for reply in self._until_all(job)]
        for number, sample in enumerate(job.samples):
            for retry in range(1, self._functions[job.call].retries + 1):
                if scored[number].parts is not None:
                    break
                scored[number] = _scored(self._single(job.call, sample), retries=retry)
        return scored

    def _until_all(self, job: Job) -> list[dict[str, Any]]:
        replies: dict[int, dict[str, Any]] = {}
        waiting = list(range(len(job.samples)))
        while waiting:
            if len(waiting) == 1:
                replies[waiting[0]] = self._single(job.call, job.samples[waiting[0]])
                break
            found, suspects = self._together(job.call, [job.samples[number] for number in waiting])
            replies |= {waiting[place]: reply for place, reply in found.items()}
            for place in suspects:
                replies[waiting[place]] = self._single(job.call, job.samples[waiting[place]])
            waiting = [number for number in waiting if number not in replies]
        return [replies[number] for number in range(len(job.samples))]

    def _single(self, call: int, sample: Sample) -> dict[str, Any]:
        try:
            return next(reply for reply in self._ask(call, [sample]) if "started" not in reply)
        except (ChildTimeout, ChildDied) as error:
            self.close()
            return {"error": str(error)}

    def _together(self, call: int, samples: Sequence[Sample]) -> tuple[dict[int, dict[str, Any]], list[int]]:
        """Replies by place, and the places of samples that may be to blame for the lack of the others'."""
        started: set[int] = set()
        replies: dict[int, dict[str, Any]] = {}
        try:
            for reply in self._ask(call, samples):
                if "started" in reply:
                    started.add(reply["sample"])
                elif "of_all" not in reply:
                    replies[reply["sample"]] = reply
        except (ChildTimeout, ChildDied):
            self.close()
        suspects = started if self.coroutines[call] and started else set(range(len(samples)))
        return replies, sorted(suspects - replies.keys())

    def _ask(self, call: int, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
        self.start()
        assert self._child is not None
        function = self._functions[call]
        request = {"call": call, "samples": samples, "concurrency": function.concurrency}
        grace_s = GRACE_S if self.coroutines[call] else 0.0
        return self._child.ask(request, function.timeout_s, grace_s=grace_s)


class RewardPool:
    """At most `num_processes` scorers. Usable from any thread, by one at a time."""

    def __init__(self, functions: Sequence[RewardFunctionConfig], *, num_processes: int, place: str) -> None:
        self._functions = tuple(functions)
        self._scorers = [RewardScorer(self._functions, place) for _ in range(num_processes)]
        self._idle = list(reversed(self._scorers))

    def start(self) -> None:
        """Start one process; raises UserError for a function that does not fit."""
        self._scorers[0].start()

    @property
    def texts(self) -> tuple[bool, ...]:
        """Which functions say that they take an answer that is a text; known after `start`."""
        return self._scorers[0].texts

    def close(self) -> None:
        """End all processes."""
        for scorer in self._scorers:
            scorer.close()

    def jobs(self, samples: Sequence[Sample]) -> list[Job]:
        """Function after function, rows in order."""
        jobs = []
        for call, function in enumerate(self._functions):
            size = len(samples) if self._scorers[0].coroutines[call] else function.batch_size or 1
            for rows in _chunks(len(samples), size):
                jobs.append(Job(call=call, rows=rows, samples=tuple(samples[row] for row in rows)))
        return jobs

    def run(self, jobs: Sequence[Job], *, stops: Callable[[Job, list[Scored]], bool]) -> list[list[Scored] | None]:
        """Results by job. Jobs start in order; none is started once `stops` says so of a result (theirs are None).

        What was started is waited for, and that is every job before one that stops: which result is the first
        to stop never depends on timing.
        """
        results: list[list[Scored] | None] = [None] * len(jobs)
        numbers, lock, stopped = iter(range(len(jobs))), threading.Lock(), threading.Event()

        def work() -> None:
            with self._scorer(lock) as scorer:
                while True:
                    with lock:
                        number = None if stopped.is_set() else next(numbers, None)
                    if number is None:
                        return
                    try:
                        results[number] = scored = scorer.score(jobs[number])
                    except BaseException:
                        stopped.set()
                        raise
                    if stops(jobs[number], scored):
                        stopped.set()

        num_threads = min(len(self._scorers), len(jobs))
        if num_threads <= 1:
            work()
            return results
        with ThreadPoolExecutor(num_threads, thread_name_prefix="rewards") as threads:
            for thread in [threads.submit(work) for _ in range(num_threads)]:
                thread.result()
        return results

    @contextmanager
    def _scorer(self, lock: threading.Lock) -> Iterator[RewardScorer]:
        with lock:
            scorer = self._idle.pop()
        try:
            yield scorer
        finally:
            with lock:
                self._idle.append(scorer)


def _chunks(count: int, size: int) -> Iterator[tuple[int, ...]]:
    for start in range(0, count, max(size, 1)):
        yield tuple(range(start, min(start + size, count)))


def _scored(reply: dict[str, Any], *, retries: int = 0) -> Scored:
    if "parts" in reply:
        extracted, extracts = reply.get(EXTRACTED), EXTRACTED in reply
        return Scored(parts=reply["parts"], extracted=extracted, extracts=extracts, retries=retries)
    return Scored(error=reply["error"], traceback=reply.get("traceback", ""), retries=retries)
