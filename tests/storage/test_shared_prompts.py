from __future__ import annotations

from storage.shared_prompts import likest_pair


def test_the_pair_shares_the_most_prompts_and_lies_furthest_apart() -> None:
    prompts = {
        0: frozenset({1, 2}),
        1: frozenset({3, 4}),
        2: frozenset({1, 3}),
        3: frozenset({3, 4}),
        4: frozenset({5}),
    }
    assert likest_pair(prompts, prompts, same_run=True) == (1, 3), "two in common, more than 0 and 2, or 2 and 3"
    assert likest_pair(prompts, {2: prompts[2]}, same_run=True) == (0, 2), "one in common with 0 and 1: furthest apart"
    assert likest_pair(prompts, prompts, same_run=True, prompt_id=1) == (0, 2)
    assert likest_pair(prompts, {4: prompts[4]}, same_run=True) is None
    assert likest_pair(prompts, prompts, same_run=False) == (3, 3), "of two runs the latest, the same iteration"
