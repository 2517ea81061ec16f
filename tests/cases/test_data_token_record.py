"""Faults 16 and 17: the sampled ids and the returned lengths are the record, never text or token values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.rollouts import Rollouts
from workers.data_source import Prompt
from workers.engines.base import FinishReason, GenerateResult, Sample
from workers.generation import pack_results

PAD_AND_EOS = 1


def sample(ids: Sequence[int], finish_reason: FinishReason) -> Sample:
    return Sample(
        token_ids=np.array(ids, np.int32),
        log_probs=-np.arange(1, len(ids) + 1, dtype=np.float32),
        policy_version=np.full(len(ids), 4, np.int32),
        finish_reason=finish_reason,
    )


def lossy_decode(ids: Sequence[int]) -> str:
    """A toy tokenizer whose encode(decode(x)) is not x: ids 5 and 6 are both written `x`."""
    return " ".join({5: "x", 6: "x"}.get(int(i), f"t{int(i)}") for i in ids)


def packed(*samples: Sample, prompt: tuple[int, ...] = (2, 3)) -> Rollouts:
    prompts = [Prompt(row=7, tokens=prompt, text="p", answer="")]
    results = [GenerateResult(request_id="0", samples=samples)]
    return pack_results(prompts, np.array([0]), results, decode=lossy_decode)


def test_the_mask_comes_from_lengths_when_pad_is_end_of_sequence() -> None:
    # The end-of-sequence id also stands in the prompt and inside a response.
    rollouts = packed(sample([5, PAD_AND_EOS], "stop"), sample([PAD_AND_EOS, 6, 6], "length"), prompt=(PAD_AND_EOS, 2))
    assert rollouts["response_mask"].tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert rollouts["response_length"].tolist() == [2, 3]
    assert rollouts["policy_version"].tolist() == [-1, -1, 4, 4, -1, -1, 4, 4, 4]


def test_the_trained_ids_are_the_sampled_ones_though_text_would_encode_differently() -> None:
    rollouts = packed(sample([6, 5, PAD_AND_EOS], "stop"))
    assert rollouts["text"][0] == "x x t1"
    assert rollouts["token_ids"].tolist() == [2, 3, 6, 5, PAD_AND_EOS]
    assert rollouts["rollout_log_probs"].tolist() == [0, 0, -1, -2, -3]
