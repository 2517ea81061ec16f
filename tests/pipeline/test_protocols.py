"""The six rows of the paper's Table 3, and a user's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.mesh import ParallelMesh
from pipeline.protocols import (
    PROTOCOLS,
    Protocol,
    Shard,
    assignments,
    collecting_ranks,
    register_protocol,
    split_rows,
)
from tests.pipeline.strategies import meshes

SPLITTING = ("3D_PROTO", "3D_ALL_MICRO_DP", "DP_PROTO", "ALL_TO_ALL")
MESH = ParallelMesh(pp=2, tp=2, dp=2, micro_dp=2)


def _shards(name: str) -> list[int]:
    return [a.shard for a in assignments(name, MESH)]


def test_the_table_has_the_papers_six_rows() -> None:
    table_3 = {"ONE_TO_ALL", "3D_PROTO", "3D_ALL_MICRO_DP", "3D_PP_ONLY", "DP_PROTO", "ALL_TO_ALL"}
    assert table_3 <= set(PROTOCOLS.names())


@pytest.mark.parametrize(
    ("name", "shards", "collected"),
    [
        ("ONE_TO_ALL", [0] * 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("3D_PROTO", [0, 0, 0, 0, 1, 1, 1, 1], [2, 6]),  # last stage, t = 0, of each replica
        ("3D_ALL_MICRO_DP", [0, 0, 1, 1, 2, 2, 3, 3], [0, 2, 4, 6]),
        ("3D_PP_ONLY", [0] * 8, [0, 2]),  # t = 0, d = 0 of both stages
        ("DP_PROTO", [0, 0, 0, 0, 1, 1, 1, 1], [0, 4]),
        ("ALL_TO_ALL", [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_a_row_of_table_3_on_a_2_2_2_mesh(name: str, shards: list[int], collected: list[int]) -> None:
    assert _shards(name) == shards
    assert collecting_ranks(assignments(name, MESH)) == collected


@given(mesh=meshes(), name=st.sampled_from(SPLITTING), num_rows=st.integers(0, 50))
def test_collecting_what_was_distributed_gives_the_rows_in_order(mesh: ParallelMesh, name: str, num_rows: int) -> None:
    assigned = assignments(name, mesh)
    received = [split_rows(num_rows, a.num_shards)[a.shard].tolist() for a in assigned]
    collected = [received[rank] for rank in collecting_ranks(assigned)]
    assert [row for part in collected for row in part] == list(range(num_rows))
    assert max(map(len, collected)) - min(map(len, collected)) <= 1


@given(mesh=meshes())
def test_every_generation_replica_receives_all_rows_of_its_training_replica(mesh: ParallelMesh) -> None:
    """Why collecting local_rank 0 loses nothing: a micro replica can take its share of what it got."""
    shards: dict[tuple[int, int], set[int]] = {}
    for at, a in zip(mesh.ranks(), assignments("3D_ALL_MICRO_DP", mesh), strict=True):
        shards.setdefault((at.d, at.micro_rank), set()).add(a.shard)
    for (d, _), received in shards.items():
        assert received == shards[(d, 0)]


@given(num_rows=st.integers(0, 200), num_shards=st.integers(1, 40))
def test_shards_are_contiguous_and_differ_by_at_most_one(num_rows: int, num_shards: int) -> None:
    shards = split_rows(num_rows, num_shards)
    assert len(shards) == num_shards
    assert [row for shard in shards for row in shard] == list(range(num_rows))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_a_users_protocol_is_a_row_like_the_others() -> None:
    register_protocol("TEST_RANK_ZERO", lambda at, mesh: Shard(index=0, count=1), lambda at, mesh: at.rank == 0)
    assert collecting_ranks(assignments("TEST_RANK_ZERO", MESH)) == [0]
    with pytest.raises(ValueError, match="registered already"):
        register_protocol("TEST_RANK_ZERO", lambda at, mesh: Shard(index=0, count=1), lambda at, mesh: True)


def test_an_unknown_protocol_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown transfer protocol 'DP'; known: .*DP_PROTO"):
        assignments("DP", MESH)


def test_a_shard_that_cannot_be_is_refused() -> None:
    wrong = Protocol(
        name="wrong", distribute=lambda at, mesh: Shard(index=at.rank, count=2), collect=lambda at, mesh: True
    )
    with pytest.raises(ValueError, match="'wrong' gives rank 2 shard 2 of 2"):
        assignments(wrong, MESH)


@pytest.mark.parametrize(("num_rows", "num_shards"), [(-1, 2), (3, 0)])
def test_impossible_splits_are_refused(num_rows: int, num_shards: int) -> None:
    with pytest.raises(ValueError, match="cannot split"):
        split_rows(num_rows, num_shards)
