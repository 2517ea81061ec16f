"""What a model can be asked for at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.engines.base import GenerateRequest, SamplingParams


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """vocabulary: number of token ids. positions: of prompt and response together."""

    vocabulary: int
    positions: int

    def check(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> None:
        """Raises ValueError for ids outside the vocabulary and for sequences that are too long."""
        if any(token >= self.vocabulary for token in sampling.stop_token_ids):
            raise ValueError(
                f"stop_token_ids {sampling.stop_token_ids}: the model's vocabulary has {self.vocabulary} ids"
            )
        for request in requests:
            name, tokens = f"request {request.request_id!r}", request.prompt_tokens
            if min(tokens) < 0 or max(tokens) >= self.vocabulary:
                raise ValueError(f"{name}: prompt id {max(tokens)} outside the model's vocabulary of {self.vocabulary}")
            if len(tokens) + sampling.max_new_tokens > self.positions:
                raise ValueError(
                    f"{name}: {len(tokens)} prompt tokens + max_new_tokens={sampling.max_new_tokens} exceed the "
                    f"model's {self.positions} positions"
                )
