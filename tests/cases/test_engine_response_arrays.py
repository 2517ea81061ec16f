"""Field fault 19: per-token arrays of a response differ in length after an interrupted generation."""

from __future__ import annotations

import numpy as np
import pytest

from workers.engines.base import Sample


def arrays(**lengths: int) -> dict[str, np.ndarray]:
    types = {"token_ids": np.int32, "log_probs": np.float32, "policy_version": np.int32}
    return {name: np.zeros(lengths.get(name, 5), dtype=dtype) for name, dtype in types.items()}


@pytest.mark.parametrize("short", ["token_ids", "log_probs", "policy_version"])
def test_arrays_of_different_length_are_no_sample(short: str) -> None:
    with pytest.raises(ValueError, match=r"differ in length: \[3, 5\]"):
        Sample(**arrays(**{short: 3}), finish_reason="length")


def test_a_response_may_hold_tokens_of_two_policies() -> None:
    made = arrays() | {"policy_version": np.array([4, 4, 4, 5, 5], dtype=np.int32)}
    assert Sample(**made, finish_reason="stop").policy_version.tolist() == [4, 4, 4, 5, 5]


def test_an_empty_response_was_aborted() -> None:
    empty = arrays(token_ids=0, log_probs=0, policy_version=0)
    with pytest.raises(ValueError, match="empty response"):
        Sample(**empty, finish_reason="stop")
    assert not len(Sample(**empty, finish_reason="abort").token_ids)
