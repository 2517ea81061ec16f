from __future__ import annotations

import numpy as np
import pytest

from configs.errors import UserError
from pipeline.cursor import batch_rows, epoch_rows
from pipeline.history import PromptHistory, history_end
from pipeline.replay import chosen_groups, replay_groups
from pipeline.rollouts import Rollouts, offsets_of
from pipeline.sampling import SamplerView, checked_rows


def rewarded(prompts: list[int], rewards: list[list[float]], dropped: list[int] | None = None) -> Rollouts:
    """A group for each prompt."""
    sizes = [len(of_group) for of_group in rewards]
    return Rollouts(
        offsets=offsets_of([1] * sum(sizes)),
        sample_columns={
            "prompt_id": np.repeat(np.array(prompts, np.int64), sizes),
            "group": np.repeat(np.arange(len(prompts), dtype=np.int32), sizes),
            "reward": np.array([r for of_group in rewards for r in of_group], np.float32),
            "reward_dropped": np.repeat(np.array(dropped or [0] * len(prompts), np.uint8), sizes),
        },
    )


def test_history_is_kept_by_prompt() -> None:
    rows = np.array([10, 20, 30])
    first = PromptHistory.empty(3).after(0, rewarded([20, 10], [[0, 1], [1, 1]]), rows)
    history = first.after(1, rewarded([20, 99], [[1, 3], [5, 5]]), rows)
    assert history.times_seen.tolist() == [1, 2, 0]
    assert history.last_iteration.tolist() == [0, 1, -1]
    np.testing.assert_allclose(history.mean_reward, [1, (0.5 + 2) / 2, np.nan])
    np.testing.assert_allclose(history.variance, [0, (0.25 + 1) / 2, np.nan])
    np.testing.assert_allclose(history.last_variance, [0, 1, np.nan])
    assert first.times_seen.tolist() == [1, 1, 0], "a history never changes"


def test_what_may_be_known_is_a_function_of_the_iteration() -> None:
    assert [history_end(i, 0) for i in range(3)] == [0, 1, 2]
    assert [history_end(i, 2) for i in range(5)] == [0, 0, 0, 1, 2]


def test_the_epochs_rows_begin_with_the_batch() -> None:
    for iteration in range(7):
        rows = epoch_rows(10, 4, iteration, 3, True)
        batch = batch_rows(10, 4, iteration, 3, True)
        assert sorted(rows) == list(range(10)) and rows[: len(batch)].tolist() == batch.tolist()


def view() -> SamplerView:
    return SamplerView(
        iteration=2, batch_size=2, rows=np.arange(5), history=PromptHistory.empty(5), seed=0, text=str,
        ask=lambda texts, *, max_new_tokens: list(texts),
    )  # fmt: skip


def test_rows_of_a_sampler_are_checked() -> None:
    assert checked_rows([4, 0], view(), "s").tolist() == [4, 0]
    problems: dict[str, list[float]] = {
        "one at least": [], "occurs twice": [1, 1], "no row 5": [5], "no row -1": [-1], "list of": [0.5],
    }  # fmt: skip
    for problem, wrong in problems.items():
        with pytest.raises(UserError, match=problem):
            checked_rows(wrong, view(), "s")  # type: ignore[arg-type]


def test_groups_to_replay_are_those_that_are_whole() -> None:
    stored = [(3, rewarded([1, 2], [[0, 1], [0, 0]])), (4, rewarded([5, 6], [[1, 1], [0, 2]], dropped=[1, 0]))]
    groups = replay_groups(6, stored)
    assert groups.iteration.tolist() == [3, 3, 4] and groups.group.tolist() == [0, 1, 1]
    assert groups.age.tolist() == [3, 3, 2] and groups.prompt_id.tolist() == [1, 2, 6]
    assert groups.variance.tolist() == [0.25, 0, 1] and groups.mean_reward.tolist() == [0.5, 0, 1]
    assert len(replay_groups(0, [])) == 0


def test_a_choice_is_repeated_and_differs_by_iteration() -> None:
    groups = replay_groups(9, [(i, rewarded(list(range(4)), [[0, 1]] * 4)) for i in range(8)])
    first = chosen_groups(groups, count=5, select="uniform", seed=1, iteration=9)
    assert first == chosen_groups(groups, count=5, select="uniform", seed=1, iteration=9)
    assert first != chosen_groups(groups, count=5, select="uniform", seed=1, iteration=10)
    assert len(set(first)) == 5
    assert chosen_groups(groups, count=2, select="newest", seed=1, iteration=9) == [31, 30]
    with pytest.raises(ValueError, match="return distinct numbers"):
        chosen_groups(groups, count=2, select="tests.pipeline.test_history:too_many", seed=1, iteration=9)


def too_many(groups: object, count: int, seed: int) -> list[int]:
    return [0, 0]
