"""Fault 24: "only equal chunks are supported"."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.mesh import ParallelMesh
from pipeline.protocols import assignments, collecting_ranks, split_rows
from pipeline.rollouts import Rollouts, concat, offsets_of


def _rollouts(num_rows: int) -> Rollouts:
    """Ragged rows whose tokens say which row they belong to; row 0 has no token at all."""
    lengths = np.arange(num_rows) % 5
    return Rollouts(
        offsets=offsets_of(lengths),
        token_columns={"token_ids": np.repeat(np.arange(num_rows, dtype=np.int32), lengths)},
        sample_columns={"prompt_id": np.arange(num_rows)},
    )


def _dispatched(rollouts: Rollouts, protocol: str, mesh: ParallelMesh) -> list[Rollouts]:
    """What each collecting rank received, in the order of collection."""
    assigned = assignments(protocol, mesh)
    received = [rollouts.select(split_rows(rollouts.num_rows, a.num_shards)[a.shard]) for a in assigned]
    return [received[rank] for rank in collecting_ranks(assigned)]


def _check(num_rows: int, protocol: str, mesh: ParallelMesh) -> None:
    rollouts = _rollouts(num_rows)
    parts = _dispatched(rollouts, protocol, mesh)
    again = concat(parts)
    np.testing.assert_array_equal(again.offsets, rollouts.offsets)
    for name in rollouts.columns:
        np.testing.assert_array_equal(again[name], rollouts[name])
    sizes = [part.num_rows for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("num_rows", "ranks"), [(2, 4), (10, 3), (0, 2), (1, 1), (7, 7)])
def test_any_number_of_rows_goes_to_any_number_of_ranks(num_rows: int, ranks: int) -> None:
    _check(num_rows, "DP_PROTO", ParallelMesh(dp=ranks))


@given(
    num_rows=st.integers(0, 40),
    protocol=st.sampled_from(["DP_PROTO", "3D_PROTO", "3D_ALL_MICRO_DP"]),
    sizes=st.tuples(st.integers(1, 3), st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]), st.integers(1, 4)),
)
def test_collecting_what_was_dispatched_gives_the_batch(
    num_rows: int, protocol: str, sizes: tuple[int, tuple[int, int], int]
) -> None:
    pp, (tp, micro_dp), dp = sizes
    _check(num_rows, protocol, ParallelMesh(pp=pp, tp=tp, dp=dp, micro_dp=micro_dp))
