"""Small packed batches with every kind of column."""

from __future__ import annotations

import numpy as np

from pipeline.rollouts import TOKEN_COLUMNS, Array, Rollouts, offsets_of


def full_batch(seed: int, num_rows: int = 5, max_tokens: int = 40) -> Rollouts:
    """Rows of random lengths (0 included) with all token columns and sample columns of each dtype."""
    random = np.random.default_rng(seed)
    offsets = offsets_of(random.integers(0, max_tokens, num_rows))
    num_tokens = int(offsets[-1])
    token = {name: (random.normal(size=num_tokens) * 100).astype(dtype) for name, (dtype, _) in TOKEN_COLUMNS.items()}
    words = ["", "plain", "ünï ☃ 漢字", "line\nbreak\x00zero", "x" * 300]
    sample: dict[str, Array] = {
        "prompt_id": random.integers(0, 2**40, num_rows),
        "group": random.integers(0, 9, num_rows).astype(np.int32),
        "reward": random.normal(size=num_rows).astype(np.float32),
        "reward/exact_match": random.normal(size=num_rows).astype(np.float32),
        "text": np.array([words[i % len(words)] for i in range(num_rows)], dtype=object),
    }
    return Rollouts(offsets=offsets, token_columns=token, sample_columns=sample)


def scores_for(rollouts: Rollouts, seed: int) -> Rollouts:
    """Two further columns for the same rows."""
    random = np.random.default_rng(seed)
    return Rollouts(
        offsets=rollouts.offsets,
        token_columns={"judge_values": random.normal(size=rollouts.num_tokens).astype(np.float32)},
        sample_columns={"cost": random.normal(size=rollouts.num_rows).astype(np.float32)},
    )


def assert_same(found: Rollouts, expected: Rollouts) -> None:
    """Bitwise equality of offsets, names, dtypes and values."""
    assert sorted(found.columns) == sorted(expected.columns)
    np.testing.assert_array_equal(found.offsets, expected.offsets)
    for name in expected.columns:
        assert found[name].dtype == expected[name].dtype, name
        if expected[name].dtype == object:
            assert list(found[name]) == list(expected[name]), name
        else:
            assert found[name].tobytes() == expected[name].tobytes(), name
