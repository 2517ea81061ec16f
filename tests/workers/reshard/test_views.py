"""How a transition is cut into launches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.reshard import views
from workers.reshard.bucket import MIB
from workers.reshard.views import launches

SIZES = st.lists(st.integers(1, 3000), max_size=60)


def cut(sizes: list[int]) -> list[list[int]]:
    """Sizes of each launch, of items that are told apart by their numbers."""
    items = list(enumerate(sizes))
    made = list(launches(items, lambda item: item[1]))
    assert sorted(item for launch in made for item in launch) == items
    return [[size for _, size in launch] for launch in made]


@given(SIZES)
def test_every_item_is_in_one_launch_and_launches_grow_within_their_limits(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "FIRST_LAUNCH_BYTES", 64)
        patch.setattr(views, "LAUNCH_BYTES", 1024)
        made = cut(sizes)
    limit = 64
    for launch in made:
        assert launch and (sum(launch) <= limit or len(launch) == 1)
        limit = min(limit * 4, 1024)


def test_the_first_launches_are_few_large_weights() -> None:
    """Qwen2 1.5 B: the embedding, then 84 weights of the MLPs, 56 of attention's outputs and queries, 56 small ones."""
    made = cut([445 * MIB, *[26 * MIB] * 84, *[4 * MIB] * 56, *[MIB // 2] * 56])
    assert made[0] == [26 * MIB] * 2 and made[1] == [26 * MIB] * 9
    assert made[2] == [445 * MIB] + [26 * MIB] * 22
    assert len(made[3]) == 84 - 33 + 56 + 56


def test_items_larger_than_every_launch_go_alone_the_smallest_first() -> None:
    assert cut([5000 * MIB, 3000 * MIB, 4000 * MIB]) == [[3000 * MIB], [4000 * MIB], [5000 * MIB]]
