"""What this project changes inside SGLang's scheduler processes.

1. The memory saver leaves the weights alone: they stay where they are, exported, while the KV cache sleeps
   (memory that the saver manages cannot be exported by CUDA IPC).
2. `min_new_tokens` works without a tokenizer, for exactly the request's stop ids.
3. Log-probabilities are those of the distribution before `min_new_tokens` restricts it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import torch

from workers.engines.sglang.spec import HANDLES

MIN_NEW_TOKENS = "hybridflow_min_new_tokens"
"""Key of a request's `custom_params`. SGLang refuses its own parameter where it has no tokenizer."""
_applied = False


def register() -> None:
    """SGLang's plugin hook. Does nothing in an SGLang that this project did not start."""
    if HANDLES in os.environ:
        apply()


def apply() -> None:
    """Make the changes in this process, once."""
    global _applied
    if not _applied:
        _applied = True
        _leave_weights_out_of_the_saver()
        _restrict_by_request()
        _keep_log_probs_unrestricted()


def _leave_weights_out_of_the_saver() -> None:
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
    from sglang.srt.utils import torch_memory_saver_adapter

    saver = torch_memory_saver_adapter._TorchMemorySaverAdapterReal
    original = saver.region

    def region(self: Any, tag: str, enable_cpu_backup: bool = False) -> Any:
        if tag == GPU_MEMORY_TYPE_WEIGHTS:
            return contextlib.nullcontext()
        return original(self, tag, enable_cpu_backup)

    saver.region = region


def _min_new_tokens(request: Any) -> int:
    return int((request.sampling_params.custom_params or {}).get(MIN_NEW_TOKENS, 0))


def _restrict_by_request() -> None:
    from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer as Penalizer

    def is_required(self: Any) -> bool:
        return any(_min_new_tokens(request) for request in self.orchestrator.reqs())

    def prepare(self: Any) -> None:
        requests, device = self.orchestrator.reqs(), self.orchestrator.device
        self.min_new_tokens = torch.tensor([[_min_new_tokens(r)] for r in requests], dtype=torch.int32).to(device)
        self.len_output_tokens = torch.tensor([[len(r.output_ids)] for r in requests], dtype=torch.int32).to(device)
        penalties = torch.zeros((len(requests), self.orchestrator.vocab_size))
        for row, request in enumerate(requests):
            penalties[row, list(request.sampling_params.stop_token_ids or ())] = float("-inf")
        self.stop_token_penalties = penalties.to(device)

    Penalizer._is_required = is_required
    Penalizer._prepare = prepare


def _keep_log_probs_unrestricted() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    original = ModelRunner.sample

    @functools.wraps(original)
    def sample(self: Any, logits_output: Any, forward_batch: Any) -> Any:
        info = forward_batch.sampling_info
        if not (forward_batch.return_logprob and _is_restricted(info)):
            return original(self, logits_output, forward_batch)
        logits = logits_output.next_token_logits.float() / info.temperatures
        tokens = original(self, logits_output, forward_batch)
        chosen = logits.gather(1, tokens.long().view(-1, 1))
        logits_output.next_token_logprobs = (chosen - logits.logsumexp(dim=-1, keepdim=True)).view(-1)
        return tokens

    ModelRunner.sample = sample


def _is_restricted(info: Any) -> bool:
    """Whether `min_new_tokens` holds for a row; the sum is what overlapped scheduling passes on."""
    penalizers = info.penalizer_orchestrator
    return info.acc_additive_penalties is not None or bool(penalizers and penalizers.is_required)
