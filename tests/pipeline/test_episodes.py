from __future__ import annotations

import numpy as np

from pipeline.episodes import Episode, Turn, histories, response_columns, state_group


def turn(ids: list[int], *, observation: tuple[int, ...] = (), reward: float = 0.0, state: str = "s") -> Turn:
    return Turn(
        token_ids=np.array(ids, np.int32),
        log_probs=-np.arange(1.0, len(ids) + 1, dtype=np.float32),
        policy_version=np.full(len(ids), 3, np.int32),
        state=state,
        reward=reward,
        observation=observation,
    )


def test_a_response_is_actions_with_observations_masked_between() -> None:
    turns = [turn([5, 6], observation=(9, 9, 9), reward=0.5, state="a"), turn([7], reward=2.0, state="b")]
    episode = Episode(prompt=(1, 2), prompt_row=4, state="b", turns=turns, end="done")
    a, b = state_group(4, "a"), state_group(4, "b")
    expected = {
        "token_ids": [5, 6, 9, 9, 9, 7],
        "response_mask": [1, 1, 0, 0, 0, 1],
        "rollout_log_probs": [-1, -2, 0, 0, 0, -1],
        "policy_version": [3, 3, -1, -1, -1, 3],
        "step": [0, 0, -1, -1, -1, 1],
        "step_reward": [0, 0.5, 0, 0, 0, 2],
        "step_group": [a, a, -1, -1, -1, b],
    }
    columns = response_columns(episode)
    assert {name: column.tolist() for name, column in columns.items()} == expected
    assert episode.reward == 2.5
    assert episode.token_ids == (1, 2, 5, 6, 9, 9, 9, 7)


def test_an_episode_without_an_action_has_empty_columns() -> None:
    columns = response_columns(Episode(prompt=(1,), prompt_row=0, state="", end="error"))
    assert {len(column) for column in columns.values()} == {0}


def test_states_are_named_by_prompt_and_state_alone() -> None:
    assert state_group(1, "x") == state_group(1, "x")
    assert len({state_group(1, "x"), state_group(2, "x"), state_group(1, "y")}) == 3
    assert all(0 <= state_group(row, "x") < 2**63 for row in range(100))


def test_equal_histories_go_on_together_and_ended_episodes_do_not() -> None:
    episodes = [Episode(prompt=(1, 2), prompt_row=0, state="") for _ in range(4)]
    episodes[1].turns.append(turn([3]))
    episodes[2].end = "done"
    assert histories(episodes) == {(1, 2): [0, 3], (1, 2, 3): [1]}
