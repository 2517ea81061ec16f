"""Ranks of a model in training and generation."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import pytest
from hypothesis import given

from pipeline.mesh import Coordinates, ParallelMesh
from tests.pipeline.strategies import meshes


def _groups(mesh: ParallelMesh, *key: str) -> list[list[int]]:
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for at in mesh.ranks():
        groups[tuple(getattr(at, name) for name in key)].append(at.rank)
    return sorted(groups.values())


def test_the_papers_figure_8b() -> None:
    mesh = ParallelMesh(pp=1, tp=4, dp=2, micro_dp=2)
    assert _groups(mesh, "micro_group") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert _groups(mesh, "d", "micro_rank") == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_the_papers_figure_7() -> None:
    """Training 1-2-2, generation 1-1-2-2: each DP replica becomes two micro replicas."""
    mesh = ParallelMesh(pp=1, tp=2, dp=2, micro_dp=2)
    assert mesh.generation_sizes == (1, 1)
    assert _groups(mesh, "micro_group") == [[0, 1], [2, 3]]


def test_training_groups_are_consecutive_and_replicas_strided() -> None:
    mesh = ParallelMesh(pp=2, tp=2, dp=2)
    assert _groups(mesh, "d", "p") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert _groups(mesh, "p", "t") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_micro_groups_are_consecutive_where_generation_sizes_are_not_named() -> None:
    mesh = ParallelMesh(pp=2, tp=2, dp=1, micro_dp=4)
    assert _groups(mesh, "micro_group") == [[0, 1, 2, 3]]


@given(mesh=meshes())
def test_every_axis_divides_the_world(mesh: ParallelMesh) -> None:
    micro = _groups(mesh, "micro_group")
    assert [len(group) for group in micro] == [mesh.micro_dp] * mesh.num_micro_groups
    assert sorted(rank for group in micro for rank in group) == list(range(mesh.world_size))
    assert all(mesh.coordinates(group[0]).micro_rank == 0 for group in micro)
    for group in micro:
        assert sorted(mesh.coordinates(rank).micro_rank for rank in group) == list(range(mesh.micro_dp))
    assert [at.rank for at in mesh.ranks()] == list(range(mesh.world_size))


@given(mesh=meshes())
def test_a_training_shard_lies_inside_the_ranks_generation_shard(mesh: ParallelMesh) -> None:
    """Section 5.3: this is why resharding needs no second copy of a rank's weights."""
    t_g, p_g = mesh.generation_sizes
    for at in mesh.ranks():
        assert _inside(Fraction(at.t, mesh.tp), Fraction(1, mesh.tp), at.generation_t, t_g)
        assert _inside(Fraction(at.p, mesh.pp), Fraction(1, mesh.pp), at.generation_p, p_g)


@given(mesh=meshes())
def test_a_micro_group_together_holds_its_generation_shard(mesh: ParallelMesh) -> None:
    for ranks in _groups(mesh, "micro_group"):
        places = [mesh.coordinates(rank) for rank in ranks]
        assert len({(at.p, at.t) for at in places}) == mesh.micro_dp
        assert len({(at.d, at.generation_p, at.generation_t) for at in places}) == 1


def _inside(start: Fraction, size: Fraction, part: int, num_parts: int) -> bool:
    return Fraction(part, num_parts) <= start and start + size <= Fraction(part + 1, num_parts)


@pytest.mark.parametrize(
    "sizes",
    [{"tp": 4, "micro_dp": 3}, {"tp": 0}, {"pp": 2, "tp": 3, "micro_dp": 2}, {"tp": 4, "generation_tp": 2}],
)
def test_sizes_that_do_not_divide_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1|generation groups"):
        ParallelMesh(**sizes)


def test_a_rank_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 4 is outside a mesh of 4 ranks"):
        ParallelMesh(dp=4).coordinates(4)


def test_coordinates_are_data() -> None:
    assert ParallelMesh(tp=2, dp=2).coordinates(3) == Coordinates(
        rank=3, p=0, t=1, d=1, generation_p=0, generation_t=1, micro_group=3, micro_rank=0
    )
