"""The generation loop of the Torch engine: one batch from its prompts to finished samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.rollouts import Array
from workers.engines.attention import AttentionStep, PromptStep, TokenStep
from workers.engines.base import SamplingParams
from workers.engines.kv_cache import KvCache
from workers.engines.random import seed_tensor
from workers.engines.sampling import sample_tokens
from workers.progress import STAGE


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Of one model's keys and values."""

    num_layers: int
    num_heads: int
    head_size: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Prompts, and for each row (sample) its prompt and its seed."""

    prompts: Sequence[Sequence[int]]
    rows: Sequence[int]
    seeds: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class DecodedBatch:
    """token_ids: int32 [B, steps]. log_probs: float32 [B, steps]. lengths, stopped: [B]."""

    token_ids: Array
    log_probs: Array
    lengths: Array
    stopped: Array


class Decoder:
    """State of one batch while it is generated. Row r of the cache is sample `slots[r]` of the batch."""

    def __init__(self, model: PreTrainedModel, shape: CacheShape, batch: Batch, sampling: SamplingParams) -> None:
        device = model.device
        self._model, self._sampling, self._batch = model, sampling, batch
        self._prompt_lengths = torch.tensor([len(prompt) for prompt in batch.prompts], device=device)
        self._rows = torch.tensor(batch.rows, device=device)
        self._slots = torch.arange(len(batch.rows), device=device)
        self._seeds = seed_tensor(batch.seeds, device)
        self._stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        self._cache = KvCache(
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            head_size=shape.head_size,
            lengths=self._prompt_lengths[self._rows],
            max_new_tokens=sampling.max_new_tokens,
            dtype=model.dtype,
        )
        outputs = (len(batch.rows), sampling.max_new_tokens)
        self._token_ids = torch.zeros(outputs, dtype=torch.int32, device=device)
        self._log_probs = torch.zeros(outputs, dtype=torch.float32, device=device)
        self._lengths = torch.full(outputs[:1], sampling.max_new_tokens, device=device)
        self._stopped = torch.zeros(outputs[:1], dtype=torch.bool, device=device)

    def run(self) -> DecodedBatch:
        """Generate until every sample is finished."""
        logits = self._prompt_logits()
        for step in range(self._sampling.max_new_tokens):
            tokens, log_probs = sample_tokens(logits, self._seeds, step, self._sampling, self._stop_ids)
            self._token_ids[self._slots, step] = tokens.int()
            self._log_probs[self._slots, step] = log_probs
            STAGE.step()
            tokens = self._without_finished(tokens, step)
            if not len(tokens) or step + 1 == self._sampling.max_new_tokens:
                break
            logits = self._token_logits(tokens)
        return DecodedBatch(
            token_ids=self._token_ids.cpu().numpy(),
            log_probs=self._log_probs.cpu().numpy(),
            lengths=self._lengths.cpu().numpy(),
            stopped=self._stopped.cpu().numpy(),
        )

    def _prompt_logits(self) -> Tensor:
        step = PromptStep(self._cache, self._prompt_lengths, self._rows)
        tokens = torch.tensor([token for prompt in self._batch.prompts for token in prompt], device=self._rows.device)
        logits = self._forward(tokens[None], step.positions[None], step, logits_to_keep=step.last)
        return logits[0][self._rows]

    def _token_logits(self, tokens: Tensor) -> Tensor:
        positions = self._cache.advance()
        return self._forward(tokens[:, None], positions, TokenStep(self._cache), logits_to_keep=1)[:, 0]

    def _forward(self, tokens: Tensor, positions: Tensor, step: AttentionStep, **keep: Any) -> Tensor:
        output = self._model(input_ids=tokens, position_ids=positions, use_cache=False, attention_step=step, **keep)
        logits: Tensor = output.logits
        return logits.float()

    def _without_finished(self, tokens: Tensor, step: int) -> Tensor:
        """The tokens of the rows that go on; finished rows leave the batch, those at the end take their places."""
        if not len(self._stop_ids):
            return tokens
        finished = torch.isin(tokens, self._stop_ids)
        # The one point of each step at which the host waits for the device.
        num_finished = int(finished.sum())
        if not num_finished:
            return tokens
        slots = self._slots[finished]
        self._lengths[slots], self._stopped[slots] = step + 1, True
        alive = len(tokens) - num_finished
        targets = finished[:alive].nonzero()[:, 0]
        sources = (~finished[alive:]).nonzero()[:, 0] + alive
        self._cache.keep(sources, targets, alive)
        for state in (self._slots, self._seeds, tokens):
            state[targets] = state[sources]
        self._slots, self._seeds = self._slots[:alive], self._seeds[:alive]
        return tokens[:alive]
