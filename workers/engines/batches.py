"""How requests are cut into batches that are generated together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.engines.base import GenerateRequest


@dataclass(frozen=True, kw_only=True)
class PromptSlice:
    """Samples `first:last` of request number `request`."""

    request: int
    first: int
    last: int

    @property
    def num_rows(self) -> int:
        return self.last - self.first


def plan_batches(
    requests: Sequence[GenerateRequest], *, max_new_tokens: int, max_batch_tokens: int
) -> list[list[PromptSlice]]:
    """Batches with (longest prompt + max_new_tokens) x rows <= max_batch_tokens, longest prompts first.

    A group of samples is split only when it exceeds the budget alone (its prompt is then computed once
    for each part); a single row above the budget is a batch of its own. Similar lengths stay together.
    """
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt_tokens))
    batches: list[list[PromptSlice]] = []
    capacity = 0
    for index in order:
        num_samples = len(requests[index].seeds)
        whole = max(1, max_batch_tokens // (len(requests[index].prompt_tokens) + max_new_tokens))
        first = 0
        while first < num_samples:
            remaining = num_samples - first
            if not capacity or (remaining > capacity and capacity < whole):
                batches.append([])
                capacity = whole
            taken = min(remaining, capacity)
            batches[-1].append(PromptSlice(request=index, first=first, last=first + taken))
            capacity -= taken
            first += taken
    return batches
