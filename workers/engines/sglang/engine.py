"""SGLang as a rollout engine, from the rank's side."""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from workers.engines.base import (
    EngineCannotStart,
    EngineError,
    EngineMetadata,
    GenerateRequest,
    GenerateResult,
    Sample,
    SamplingParams,
)
from workers.engines.request_limits import RequestLimits
from workers.engines.sglang.process import EngineDied, EngineProcess
from workers.engines.sglang.spec import Draw, Drawn, EngineSpec, Failed

if TYPE_CHECKING:
    from torch import Tensor

    from workers.engines.sglang.handles import Exported

logger = logging.getLogger(__name__)
NO_WEIGHTS = -1
PERMANENT = (
    r"\b(ModuleNotFound|Import|Syntax|Name|Attribute|Type|Value|Key|Assertion|NotImplemented|FileNotFound|Permission)"
    r"Error: |is longer than \d+ characters"
)
"""What says that a program, its files, its arguments or a socket's path are wrong, which no further start mends."""
PASSING = r"[Mm]emory|not done within|no sign of life"
"""Unless it is memory, which others may give back, or a deadline, of which the log's last exception says nothing."""
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}
"""Expected |engine - trainer| of one log-probability: the kernels differ, and 16-bit logits are rounded."""


class SglangEngine:
    """One engine in processes of its own, started at the first use of its weights.

    Its parameters are SGLang's: fused `qkv_proj` and `gate_up_proj`, a padded vocabulary, one slice for each
    TP rank. A version of -1 means that nobody has written weights yet, or that the processes ended since:
    `weights` then starts them (again), and they have to be written before `generate`.

    Raises EngineError, naming exit code and log, from a start or `generate` during which the processes end. When they
    end or fail over anything else nothing is lost: the log has a warning, and the version says so.
    reproducible: only on a GPU under `deterministic`, which costs speed.
    """

    def __init__(self, spec: EngineSpec, *, log: Path, start_timeout_s: float, request_timeout_s: float) -> None:
        self.spec, self.log = spec, log
        self.reproducible = spec.deterministic
        self._start_timeout_s, self._request_timeout_s = start_timeout_s, request_timeout_s
        self._limits = RequestLimits(vocabulary=spec.vocabulary, positions=spec.max_positions)
        self._process: EngineProcess | None = None
        self._exported: tuple[Exported, ...] = ()
        self._weights: dict[str, Tensor] = {}
        self._version = NO_WEIGHTS
        self._awake, self._waking = True, False
        self._caches_prefixes = True

    @property
    def version(self) -> int:
        """-1 also when the processes have ended since the last call."""
        return self._version if self._is_running() else NO_WEIGHTS

    @property
    def metadata(self) -> EngineMetadata:
        return EngineMetadata(
            engine="sglang",
            dtype=self.spec.dtype,
            reproducible=self.reproducible,
            log_prob_tolerance=TOLERANCES[self.spec.dtype],
        )

    @property
    def launcher_pid(self) -> int | None:
        """None while no process runs."""
        return self._process.pid if self._process is not None and self._is_running() else None

    def exported(self) -> tuple[Exported, ...]:
        """Handles of every TP rank's parameters, for the ranks of the group; starts the engine when needed.

        They change when the engine is started again. Each is picklable and `mapped()` by the rank that holds
        the same device.
        """
        if not self._is_running():
            self._start()
        return self._exported

    def weights(self) -> dict[str, Tensor]:
        """The first TP rank's parameters by SGLang's names, tied ones once, in the engine's own memory."""
        exported = self.exported()
        if not self._weights:
            self._weights = exported[0].mapped()
        return self._weights

    def set_version(self, version: int) -> None:
        """The weights are written: forget every prefix that was computed with older ones."""
        if self._caches_prefixes:
            self._control("flush")
            self._caches_prefixes = False
        self._version = version

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[GenerateResult]:
        """See `RolloutEngine.generate`; a request of which a sample failed is left out, and the log says why.

        Raises ValueError for ids or lengths that the model cannot take, EngineError when asleep, without
        weights, or when the weights give log-probabilities that are not finite.
        """
        if not self._awake:
            raise EngineError("sglang engine: asleep, call wake() first")
        if self.version == NO_WEIGHTS:
            raise EngineError(f"sglang engine: it holds no weights ({self._ending()}); write them and call set_version")
        self._limits.check(requests, sampling)
        draws = _draws(requests)
        return self._results(requests, self._drawn(draws, sampling) if draws else [])

    def _drawn(self, draws: Sequence[Draw], sampling: SamplingParams) -> list[Drawn | Failed]:
        assert self._process is not None  # whose version it is
        self._caches_prefixes = True
        with self._ending_on_failure("generate"):
            # No deadline for the whole: the launcher ends it when nothing comes any more.
            arguments = (draws, sampling, self._request_timeout_s)
            drawn: list[Drawn | Failed] = self._process.call("generate", *arguments, deadline_s=math.inf)
        return drawn

    def sleep(self) -> None:
        """Release the KV cache's memory (on a CPU: empty it). The weights stay, and may be written.

        Of processes that have ended, over this too, nothing has to be released; the version says so.
        """
        self._finish_waking()
        if self._is_running() and self._awake:
            self._control("sleep")
            self._caches_prefixes = False
        self._awake = False

    def start_waking(self) -> None:
        """Have `wake` begun, which then only waits; the weights may be written meanwhile."""
        if self._process is None or not self._is_running() or self._awake or self._waking:
            return
        with self._losing_nothing("wake"):
            self._process.send("wake")
            self._waking = True

    def wake(self) -> None:
        self.start_waking()
        self._finish_waking()
        self._awake = True

    def _finish_waking(self) -> None:
        if self._process is None or not self._waking:
            return
        self._waking = False
        with self._losing_nothing("wake"):
            self._process.receive("wake")
        self._awake = True

    def shutdown(self) -> None:
        """End the processes and wait for their memory; a later `weights` starts them again."""
        if self._process is not None:
            self._process.kill()
        self._forget()

    def _is_running(self) -> bool:
        return self._process is not None and self._process.alive()

    def _start(self) -> None:
        # What is left of processes that ended by themselves goes first.
        self.shutdown()
        logger.info("starting sglang on %s; log: %s", self.spec.device, self.log)
        process = self._process = EngineProcess(self.spec, log=self.log)
        with self._ending_on_failure("start"):
            process.started(deadline_s=self._start_timeout_s)
            self._exported = tuple(process.call("export"))

    def _control(self, operation: str) -> None:
        if self._process is None:
            raise EngineError(f"sglang engine: {operation} before weights(): no process runs")
        self._finish_waking()
        with self._losing_nothing(operation):
            self._process.call(operation)

    @contextmanager
    def _losing_nothing(self, operation: str) -> Iterator[None]:
        """What it has generated is with the rank already: an engine that fails over this has no version any more, and
        whoever wants to generate starts it again."""
        try:
            with self._ending_on_failure(operation):
                yield
        except EngineError as error:
            logger.warning("%s", error)

    @contextmanager
    def _ending_on_failure(self, operation: str) -> Iterator[None]:
        """An engine that died is forgotten; one in an unknown state is ended, and not asked again."""
        try:
            yield
        except EngineDied as error:
            self._forget()
            raise failure(operation, with_remedy(str(error))) from error
        except RuntimeError as error:
            self.shutdown()
            raise failure(operation, f"{with_remedy(str(error))}; log: {self.log}") from error

    def _forget(self) -> None:
        """Drop what belonged to the last process: handles of freed memory must not be used or kept open."""
        self._weights, self._exported, self._version = {}, (), NO_WEIGHTS
        self._awake, self._waking = True, False
        self._caches_prefixes = True

    def _ending(self) -> str:
        return "none were written" if self._process is None or self._is_running() else "its processes have ended"

    def _results(self, requests: Sequence[GenerateRequest], drawn: Sequence[Drawn | Failed]) -> list[GenerateResult]:
        samples: dict[int, Sample] = {}
        failures: dict[str, int] = defaultdict(int)
        for each in drawn:
            if isinstance(each, Failed):
                failures[each.reason] += 1
            else:
                samples[each.number] = self._sample(each)
        for reason, count in failures.items():
            logger.warning("sglang engine: %d samples failed: %s", count, reason)
        return _complete(requests, samples)

    def _sample(self, drawn: Drawn) -> Sample:
        if not np.isfinite(drawn.log_probs).all():
            raise EngineError("sglang engine: log-probabilities are not finite; the weights hold NaN or infinity")
        return Sample(
            token_ids=drawn.token_ids,
            log_probs=drawn.log_probs,
            policy_version=np.full(len(drawn.token_ids), self._version, dtype=np.int32),
            finish_reason="stop" if drawn.stopped else "length",
        )


def _draws(requests: Sequence[GenerateRequest]) -> list[Draw]:
    """Every prompt's first sample, then every second one, ...: a prompt is in the prefix cache for the later ones."""
    numbered: list[tuple[int, Draw]] = []
    number = 0
    for request in requests:
        prompt = [int(token) for token in request.prompt_tokens]
        for place, seed in enumerate(request.seeds):
            numbered.append((place, Draw(number=number, prompt_tokens=prompt, seed=seed)))
            number += 1
    return [draw for _, draw in sorted(numbered, key=lambda pair: pair[0])]


def _complete(requests: Sequence[GenerateRequest], samples: dict[int, Sample]) -> list[GenerateResult]:
    results = []
    first = 0
    for request in requests:
        numbers = range(first, first + len(request.seeds))
        first += len(request.seeds)
        if all(number in samples for number in numbers):
            own = tuple(samples[number] for number in numbers)
            results.append(GenerateResult(request_id=request.request_id, samples=own))
    return results


def failure(operation: str, reason: str) -> EngineError:
    """Of a start, whether another one may go better: not where the engine's program says what is wrong with it."""
    may_pass = operation != "start" or not re.search(PERMANENT, reason) or re.search(PASSING, reason)
    kind = EngineError if may_pass else EngineCannotStart
    return kind(f"sglang engine: {operation} failed: {reason}")


def with_remedy(reason: str) -> str:
    """The engine's words, and the setting to change when they are about memory."""
    if "out of memory" in reason.lower() or "not enough memory" in reason.lower():
        return f"{reason}; change rollout.memory_fraction, or offload more of what shares the device"
    return reason
