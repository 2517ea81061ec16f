"""How the reward process calls functions: one sample at a time, lists at once, or coroutines side by side."""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from configs.errors import UserError, shown
from configs.own_frames import last_own_frame, shown_frame
from configs.secrets import masked, resolved_options
from workers.reward_paths import FunctionPathError, resolve
from workers.verifiers import BUILT_IN, Verdict

SCORE = "score"
"""Part of a function's result that is rewarded; a function that returns a number returns this part."""
EXTRACTED = "extracted"
"""Entry of a function's dict with the answer that it read in the response, for maj@n."""

Reply = dict[str, Any]
Send = Callable[[Reply], None]
Sample = Sequence[Any]
"""prompt, response, answer."""


def reply_of(result: object) -> Reply:
    """parts: as `parts_of`. extracted: the answer that the function read, where it says so (None: there is none)."""
    if isinstance(result, Verdict):
        return {"parts": parts_of(result), EXTRACTED: result.extracted}
    if not isinstance(result, Mapping) or EXTRACTED not in result:
        return {"parts": parts_of(result)}
    extracted = result[EXTRACTED]
    if extracted is not None and not isinstance(extracted, str):
        raise TypeError(f"{EXTRACTED} is {extracted!r} of type {type(extracted).__name__}, not a text or None")
    return {"parts": parts_of({n: v for n, v in result.items() if n != EXTRACTED}), EXTRACTED: extracted}


def parts_of(result: object) -> dict[str, float]:
    """A function's result as named finite numbers; raises TypeError or ValueError for anything else."""
    parts = result if isinstance(result, Mapping) else {SCORE: result}
    if SCORE not in parts:
        raise ValueError(f"returned a dict without {SCORE!r}: {', '.join(map(str, parts)) or 'empty'}")
    return {str(name): _finite(name, value) for name, value in parts.items()}


def _finite(name: object, value: object) -> float:
    # numpy and torch scalars are numbers to their users: both have `item`.
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}, not a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}, not a finite number")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class LoadedFunction:
    """A function with its options. batched: it takes lists of prompts, responses and answers."""

    function: Callable[..., Any]
    options: Mapping[str, Any]
    batched: bool

    @property
    def is_coroutine(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @property
    def takes_texts(self) -> bool:
        """Whether its third parameter, the answer, says that it is a text."""
        parameters = list(inspect.signature(self.function).parameters.values())
        return not self.batched and len(parameters) > 2 and parameters[2].annotation in (str, "str")


@dataclass(kw_only=True)
class Functions:
    """The loaded functions; answers requests, a reply for each sample (`workers.reward_process`)."""

    send: Send
    _loaded: list[LoadedFunction] = field(default_factory=list)
    _runner: asyncio.Runner = field(default_factory=asyncio.Runner)

    def answer(self, request: Mapping[str, Any]) -> None:
        if "load" in request:
            self.send(self._load(request["load"]))
            return
        loaded, samples = self._loaded[request["call"]], request["samples"]
        if loaded.is_coroutine:
            # One loop for the life of the process: what a module keeps between calls stays usable.
            self._runner.run(_side_by_side(loaded, samples, self.send, request["timeout_s"], request["concurrency"]))
        elif loaded.batched:
            _at_once(loaded, samples, self.send)
        else:
            for number, sample in enumerate(samples):
                self.send({"sample": number, **_one(loaded, sample)})

    def _load(self, functions: list[dict[str, Any]]) -> Reply:
        for index, function in enumerate(functions):
            try:
                found = resolve(function["path"], function["options"])
                options = resolved_options(function["options"])
            except (FunctionPathError, UserError) as error:
                return {"loaded": str(error), "function": index}
            loaded = LoadedFunction(function=found, options=options, batched=function["batched"])
            if loaded.batched and (loaded.is_coroutine or function["path"] in BUILT_IN):
                kind = "a coroutine function" if loaded.is_coroutine else "built in"
                return {"loaded": f"is {kind} and takes one sample a call; remove batch_size", "function": index}
            self._loaded.append(loaded)
        return {
            "loaded": None,
            "coroutines": [loaded.is_coroutine for loaded in self._loaded],
            "texts": [loaded.takes_texts for loaded in self._loaded],
        }


def _one(loaded: LoadedFunction, sample: Sample) -> Reply:
    try:
        return reply_of(loaded.function(*sample, **loaded.options))
    # Whatever a user's function raises (SystemExit too) is the answer, with its traceback.
    except BaseException as error:  # noqa: BLE001
        return _error(error, [sample])


def _at_once(loaded: LoadedFunction, samples: Sequence[Sample], send: Send) -> None:
    """One call for all. `of_all`: the error is the call's, and nobody knows whose fault it is."""
    try:
        results = list(loaded.function(*(list(column) for column in zip(*samples, strict=True)), **loaded.options))
        if len(results) != len(samples):
            raise ValueError(f"returned {len(results)} results for {len(samples)} samples")
    except BaseException as error:  # noqa: BLE001
        for number in range(len(samples)):
            send({"sample": number, "of_all": True, **_error(error, samples)})
        return
    for number, result in enumerate(results):
        try:
            send({"sample": number, **reply_of(result)})
        except (TypeError, ValueError, OverflowError) as error:
            send({"sample": number, **_error(error)})


async def _side_by_side(
    loaded: LoadedFunction, samples: Sequence[Sample], send: Send, timeout_s: float, concurrency: int
) -> None:
    """At most `concurrency` samples in flight; each has its own time limit, from its own start."""
    places = asyncio.Semaphore(concurrency)

    async def one(number: int, sample: Sample) -> None:
        async with places:
            send({"sample": number, "started": True})
            send({"sample": number, **await _limited(loaded, sample, timeout_s)})

    await asyncio.gather(*(one(number, sample) for number, sample in enumerate(samples)))


async def _limited(loaded: LoadedFunction, sample: Sample, timeout_s: float) -> Reply:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return reply_of(await loaded.function(*sample, **loaded.options))
    except BaseException as error:  # noqa: BLE001
        return {"error": f"no result within {timeout_s:g} s"} if limit.expired() else _error(error, [sample])


def _answer_remedy(error: BaseException, samples: Sequence[Sample]) -> str:
    """Where the function may have taken an answer for a text that is none."""
    others = [answer for _, _, answer in samples if answer is not None and not isinstance(answer, str)]
    if not others or not isinstance(error, TypeError | AttributeError):
        return ""
    return (
        f"; its answer is {shown(others[0])} of type {type(others[0]).__name__}, no text: take it as one with "
        "str(answer), or write texts into the data's data.answer_column"
    )


def _error(error: BaseException, samples: Sequence[Sample] = ()) -> Reply:
    """samples: which the function failed on; empty: it did not."""
    line, frame = " ".join(f"{type(error).__name__}: {error}".split()), last_own_frame(error)
    place = "" if frame is None else f" ({shown_frame(frame)})"
    return {"error": masked(line + place + _answer_remedy(error, samples)), "traceback": masked(traceback.format_exc())}
