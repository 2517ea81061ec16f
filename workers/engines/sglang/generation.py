"""One call of `generate` on SGLang's engine, sample by sample, with a limit on silence."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from workers.engines.base import SamplingParams
from workers.engines.sglang.plugin import MIN_NEW_TOKENS
from workers.engines.sglang.spec import Draw, Drawn, EngineSpec, Failed
from workers.engines.sglang.versions import abort, is_responsive, tokens_so_far
from workers.progress import STAGE

logger = logging.getLogger(__name__)
TICK_S = 0.5
ABORT_S = 5.0
"""For aborted requests to come back, and for the schedulers to answer at all."""


class EngineHangs(RuntimeError):
    """The schedulers do not answer."""


class Generation:
    def __init__(self, engine: Any, spec: EngineSpec) -> None:
        self._engine, self._spec = engine, spec
        self._calls = 0

    def generate(self, draws: Sequence[Draw], sampling: SamplingParams, timeout_s: float) -> list[Drawn | Failed]:
        """Results in any order. When nothing new comes for `timeout_s`, what is not finished is given up.

        Raises EngineHangs when the schedulers do not even answer then.
        """
        self._calls += 1
        results: list[Drawn | Failed] = self._engine.loop.run_until_complete(self._all(draws, sampling, timeout_s))
        return results

    async def _all(self, draws: Sequence[Draw], sampling: SamplingParams, timeout_s: float) -> list[Drawn | Failed]:
        STAGE.begin(len(draws))
        tasks = [asyncio.create_task(self._one(draw, sampling), name=self._name(draw)) for draw in draws]
        given_up = await self._wait(set(tasks), timeout_s)
        return [
            Failed(number=draw.number, reason=f"nothing came for {timeout_s:g} s")
            if task in given_up
            else task.result()
            for draw, task in zip(draws, tasks, strict=True)
        ]

    async def _wait(self, pending: set[asyncio.Task[Any]], timeout_s: float) -> set[asyncio.Task[Any]]:
        """Wait for the tasks; returns those that were given up."""
        seen, since = (0, 0), time.monotonic()
        while pending:
            _, pending = await asyncio.wait(pending, timeout=TICK_S)
            STAGE.at(STAGE.counts[1] - len(pending))
            progress = (len(pending), tokens_so_far(self._engine, [task.get_name() for task in pending]))
            if progress != seen:
                seen, since = progress, time.monotonic()
            elif time.monotonic() - since > timeout_s:
                break
        if pending:
            await self._give_up(pending)
        return pending

    async def _give_up(self, pending: set[asyncio.Task[Any]]) -> None:
        if not await is_responsive(self._engine, ABORT_S):
            raise EngineHangs(f"{len(pending)} samples are waiting and the schedulers do not answer")
        for task in pending:
            abort(self._engine, task.get_name())
        _, stuck = await asyncio.wait(pending, timeout=ABORT_S)
        for task in stuck:
            task.cancel()

    def _name(self, draw: Draw) -> str:
        return f"{self._calls}-{draw.number}"

    async def _one(self, draw: Draw, sampling: SamplingParams) -> Drawn | Failed:
        try:
            reply = await self._engine.async_generate(
                input_ids=list(draw.prompt_tokens),
                sampling_params=request_parameters(sampling, draw.seed if self._spec.deterministic else None),
                return_logprob=True,
                rid=self._name(draw),
            )
        # SGLang raises what it refuses; that sample alone has failed.
        except Exception as error:  # noqa: BLE001
            return Failed(number=draw.number, reason=" ".join(f"{type(error).__name__}: {error}".split()))
        return result_of(draw.number, reply, sampling.stop_token_ids)


def request_parameters(sampling: SamplingParams, seed: int | None) -> dict[str, Any]:
    """SGLang's words for it. Stop ids are the request's own only: the model's configuration names none."""
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,
        "no_stop_trim": True,
    }
    if sampling.min_new_tokens and sampling.stop_token_ids:
        parameters["custom_params"] = {MIN_NEW_TOKENS: sampling.min_new_tokens}
    if seed is not None:
        parameters["sampling_seed"] = seed & 0x7FFF_FFFF_FFFF_FFFF
    return parameters


def result_of(number: int, reply: dict[str, Any], stop_token_ids: Sequence[int]) -> Drawn | Failed:
    """SGLang says `length` of a sample whose last possible token is a stop token; here it has stopped."""
    details = reply["meta_info"]
    reason = details["finish_reason"] or {"type": "abort", "message": "it ended without a reason"}
    if reason["type"] not in ("stop", "length"):
        return Failed(number=number, reason=f"{reason['type']}: {reason.get('message', 'no message')}")
    pairs = details["output_token_logprobs"]
    token_ids = np.array([pair[1] for pair in pairs], dtype=np.int32)
    if token_ids.tolist() != list(reply["output_ids"]):
        return Failed(number=number, reason="its token ids and log-probabilities do not belong together")
    log_probs = np.array([pair[0] for pair in pairs], dtype=np.float32)
    stopped = bool(len(token_ids)) and int(token_ids[-1]) in stop_token_ids
    if reason["type"] == "stop" and not stopped:
        return Failed(number=number, reason=f"it stopped for another reason than its stop ids: {reason}")
    return Drawn(number=number, token_ids=token_ids, log_probs=log_probs, stopped=stopped)
