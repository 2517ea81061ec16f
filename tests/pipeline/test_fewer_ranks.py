"""Which pools give up ranks, whatever the workers that are left."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.loader import apply_overrides
from configs.pool_checks import pool_problems, pools_with_ranks
from configs.schema import RunConfig
from pipeline.fewer_ranks import fewer_ranks, least_ranks, options_for, with_pool_sizes
from pipeline.placement import pool_sizes


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(changes)


def three_pools(*ranks: int, least: tuple[int | None, ...], size: int = 1) -> RunConfig:
    pools = {n: {"ranks": r, "min_ranks": m} for n, r, m in zip("abc", ranks, least, strict=True)}
    placement = {"actor": "a", "critic": "b", "rollout": "c"}
    rollout = {"engine": "sglang", "tensor_parallel_size": size}
    return config(resources={"num_ranks": sum(ranks), "pools": pools, "placement": placement}, rollout=rollout)


def chosen(run: RunConfig, available: int, **survivors: int) -> dict[str, int] | None:
    return fewer_ranks(run, least_ranks(run), available=available, survivors=survivors)


def test_nothing_is_given_up_that_is_not_allowed_to_go() -> None:
    assert chosen(config(resources={"num_ranks": 2}), 1, main=1) is None
    assert chosen(config(resources={"num_ranks": 4, "min_ranks": 2}), 3, main=3) == {"main": 3}
    assert chosen(config(resources={"num_ranks": 4, "min_ranks": 2}), 1, main=1) is None


def test_the_pool_that_has_lost_ranks_gives_them_up_and_another_only_where_it_may_not() -> None:
    run = three_pools(4, 2, 2, least=(1, 1, 1))
    assert chosen(run, 7, a=4, b=1, c=2) == {"a": 4, "b": 1, "c": 2}
    assert chosen(run, 6, a=2, b=2, c=2) == {"a": 2, "b": 2, "c": 2}
    fixed = three_pools(4, 2, 2, least=(1, None, 1))
    assert chosen(fixed, 7, a=4, b=1, c=2) == {"a": 3, "b": 2, "c": 2}


def test_engines_stay_whole() -> None:
    assert chosen(three_pools(2, 1, 4, least=(None, None, 2), size=2), 6, a=2, b=1, c=3) == {"a": 2, "b": 1, "c": 2}
    beside = {"engine": "sglang", "tensor_parallel_size": 2}
    run = config(resources={"num_ranks": 4, "min_ranks": 2}, rollout=beside)
    assert chosen(run, 3, main=3) == {"main": 2}


@given(st.data())
def test_what_is_chosen_fits_and_is_a_configuration_that_is_accepted(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 3))
    ranks = tuple(data.draw(st.integers(1, 4)) * (size if name == "c" else 1) for name in "abc")
    least = tuple(data.draw(st.one_of(st.none(), st.integers(1, n))) for n in ranks)
    run = three_pools(*ranks, least=least, size=size)
    if list(pool_problems(run)):
        return
    survivors = {name: data.draw(st.integers(0, n)) for name, n in zip("abc", ranks, strict=True)}
    left = sum(survivors.values())
    sizes = chosen(run, left, **survivors)
    if sizes is None:
        assert left < sum(least_ranks(run).values())
    else:
        assert sum(sizes.values()) <= left and list(pool_problems(with_pool_sizes(run, sizes))) == []
        assert pool_sizes(with_pool_sizes(run, sizes)) == sizes
        assert all(least_ranks(run)[name] <= sizes[name] <= ranks["abc".index(name)] for name in sizes)
    if options := options_for(run, available=left, survivors=survivors):
        smaller = apply_overrides(run, options.replace("--set ", "").split())
        assert list(pool_problems(smaller)) == [] and sum(pool_sizes(smaller).values()) <= left
        assert smaller.resources.num_ranks == sum(pool.ranks for pool in pools_with_ranks(smaller))


@pytest.mark.parametrize(
    ("resources", "problem"),
    [
        ({"num_ranks": 2, "min_ranks": 3}, "resources.min_ranks: 3 is more than resources.num_ranks 2; lower it"),
        (
            {"num_ranks": 4, "min_ranks": 1},
            "resources.min_ranks: engines of rollout.tensor_parallel_size 2 do not divide 1 ranks; set it to 2",
        ),
        ({"num_ranks": 3}, "rollout.tensor_parallel_size: 2 does not divide the 3 ranks of pool 'main'; "),
        (
            {"num_ranks": 2, "min_ranks": 2, "pools": {"a": {"ranks": 2}}},
            "resources.min_ranks: 2 is of the default pool, and there are others; set min_ranks of those that may lose "
            "ranks, as resources.pools.a.min_ranks",
        ),
        (
            {"num_ranks": 2, "pools": {"a": {"ranks": 2, "min_ranks": 4}}},
            "resources.pools.a.min_ranks: 4 is more than resources.pools.a.ranks 2; lower it",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(resources: dict[str, Any], problem: str) -> None:
    (line,) = pool_problems(config(resources=resources, rollout={"engine": "sglang", "tensor_parallel_size": 2}))
    assert line.startswith(problem)
