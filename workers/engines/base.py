"""What a rollout engine is: requests in, sampled ids with their log-probabilities out.

Nouns: a **request** is one prompt with a seed for each of its samples; a **sample** is one response.
Definitions that every engine keeps:

- A response is the ids that were sampled, the stop token included when one was sampled. It is never
  empty and never decoded and encoded again: the ids are the record.
- `log_probs[t]` is the log-probability of `token_ids[t]` under `LOG_PROB_DEFINITION`.
- The random numbers of token t of a sample depend on (the sample's seed, t) only, so a sample does
  not depend on what it was batched with (up to the rounding of the matrix products). An engine that
  cannot promise this says `reproducible = False`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import numpy as np

from pipeline.rollouts import Array
from workers.envelope import StageError
from workers.remedies import ErrorClass

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
"""A stop token was sampled; `max_new_tokens` was reached; the engine gave the sample up."""

LOG_PROB_DEFINITION = (
    "log softmax(logits / temperature) over the whole vocabulary, in float32: top_p, top_k and "
    "min_new_tokens restrict what is sampled but not this distribution; temperature 0 (greedy) counts as 1"
)
"""Trainers recompute exactly this quantity, so that the importance ratio of unchanged weights is 1."""


class EngineError(StageError, RuntimeError):
    """The engine failed; the stage may be tried again."""

    error_class: ErrorClass = "engine"


class EngineCannotStart(EngineError):
    """The engine's program refuses to start, and would the next time."""

    error_class: ErrorClass = "start"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Raises ValueError for values outside their range."""

    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    """Smallest set of most likely tokens whose probability reaches this; 1: all."""
    top_k: int = 0
    """0: no limit."""
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    """Stop tokens are not sampled before this many tokens."""
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        valid = {
            "temperature": self.temperature >= 0,
            "top_p": 0 < self.top_p <= 1,
            "top_k": self.top_k >= 0,
            "max_new_tokens": self.max_new_tokens >= 1,
            "min_new_tokens": 0 <= self.min_new_tokens <= self.max_new_tokens,
            "stop_token_ids": all(token >= 0 for token in self.stop_token_ids),
        }
        for name, holds in valid.items():
            if not holds:
                raise ValueError(f"sampling: {name}={getattr(self, name)} is out of range")

    @property
    def scale(self) -> float:
        """What logits are divided by for log-probabilities: the temperature, 1 when greedy."""
        return self.temperature or 1.0


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One prompt and the 64-bit seeds of its samples. Raises ValueError for an empty prompt."""

    request_id: str | int
    prompt_tokens: Sequence[int]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.prompt_tokens):
            raise ValueError(f"request {self.request_id!r} has an empty prompt: at least one token is needed")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response of N >= 1 tokens (0 only when aborted).

    token_ids: int32 [N]. log_probs: float32 [N]. policy_version: int32 [N], the weights that emitted
    each token. Raises ValueError when the arrays differ in length.
    """

    token_ids: Array
    log_probs: Array
    policy_version: Array
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.log_probs), len(self.policy_version)}
        if len(lengths) != 1:
            raise ValueError(f"token ids, log-probabilities and versions differ in length: {sorted(lengths)}")
        if self.finish_reason not in get_args(FinishReason):
            raise ValueError(f"finish reason {self.finish_reason!r}; valid: {', '.join(get_args(FinishReason))}")
        if not len(self.token_ids) and self.finish_reason != "abort":
            raise ValueError("an empty response that was not aborted")


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """The samples of one request, in the order of its seeds."""

    request_id: str | int
    samples: tuple[Sample, ...]


@dataclass(frozen=True, kw_only=True)
class EngineMetadata:
    """Stored beside rollouts, so that a reader knows what the numbers mean."""

    engine: str
    dtype: str
    reproducible: bool
    """Same seeds, same weights: same samples, whatever else is generated at the same time."""
    log_prob_tolerance: float
    """Expected bound of |engine - trainer| for one log-probability with the same weights."""
    log_prob_definition: str = LOG_PROB_DEFINITION


class RolloutEngine(Protocol):
    """The whole of what the rest of the system knows about an engine."""

    reproducible: bool

    @property
    def version(self) -> int:
        """Policy version of the weights that it holds; -1: they have to be written first."""
        ...

    @property
    def metadata(self) -> EngineMetadata: ...

    def weights(self) -> dict[str, Tensor]:
        """Parameters by the engine's own names and shapes, to be written in place; tied ones once.

        Valid until the next `sleep` or `EngineError`. After writing, call `set_version`.
        """
        ...

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[GenerateResult]:
        """Results in the order of the requests; any number of them, 0 included."""
        ...

    def set_version(self, version: int) -> None:
        """The weights are now those of this policy version; everything cached from older ones is dropped."""
        ...

    def sleep(self) -> None:
        """Free the device; `generate` is an error until `wake`."""
        ...

    def wake(self) -> None: ...

    def shutdown(self) -> None: ...


def missing_requests(
    requests: Sequence[GenerateRequest], results: Mapping[str | int, GenerateResult]
) -> list[GenerateRequest]:
    """Requests without a result, or with another number of samples than seeds."""
    return [
        request
        for request in requests
        if request.request_id not in results or len(results[request.request_id].samples) != len(request.seeds)
    ]


def weights_checksum(weights: Mapping[str, Tensor]) -> str:
    """Digest of names, dtypes, shapes and bytes; equal on both sides of a weight transition."""
    import hashlib

    import torch

    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        tensor = weights[name].detach().to("cpu").contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(np.asarray(tensor.reshape(-1).view(torch.uint8)).data)
    return digest.hexdigest()
