"""GiGPO (Feng et al. 2025, arXiv 2505.10978): groups within groups, for agents that act over several turns.

    A(action t of episode i) = A_E(i) + OMEGA * A_S(i, t)

A_E compares the episode's reward with those of the prompt's other episodes, as GRPO does. A_S compares the action's
discounted return, sum over k >= t of gamma^(k - t) r_k, with those of all actions that were taken in the same state
of the same prompt (an anchor state), whatever episode and turn they belong to. Either is divided by its group's
standard deviation with advantage.normalize_by_std; a state that was met once has A_S = 0.

The environment's columns: `step` numbers an episode's actions, `step_reward` is an action's reward at its last
token, `step_group` names the state.
"""

import numpy as np

from configs.schema import RunConfig
from pipeline.advantages import Estimate, ResponseTokens
from pipeline.advantages.groups import Groups

OMEGA = 1.0


def gigpo(tokens: ResponseTokens, config: RunConfig) -> Estimate:
    rollouts, rows = tokens.rollouts, tokens.rows
    steps = rollouts["step"][tokens.index].astype(np.int64)
    # actions, in the order of (episode, turn); `action` is the one of each token
    _, first, action = np.unique(np.stack([rows, steps]), axis=1, return_index=True, return_inverse=True)
    rewards = np.bincount(action, weights=tokens.column("step_reward"))
    returns = discounted(rewards, rows[first], config.advantage.gamma)
    episode = relative(tokens.sequence_rewards(), Groups.of(rollouts["group"]), config)
    states = Groups.of(rollouts["step_group"][tokens.index][first])
    advantages = episode[rows] + OMEGA * relative(returns, states, config)[action]
    metrics = {"actions_with_company": float((states.size_of_row > 1).mean())} if len(first) else {}
    return Estimate(advantages=advantages, returns=returns[action], metrics=metrics)


def discounted(rewards: np.ndarray, episodes: np.ndarray, gamma: float) -> np.ndarray:
    """float64 [actions]: each action's reward and those after it in its episode, discounted."""
    returns = rewards.astype(np.float64)
    for at in range(len(returns) - 2, -1, -1):
        if episodes[at] == episodes[at + 1]:
            returns[at] += gamma * returns[at + 1]
    return returns


def relative(values: np.ndarray, groups: Groups, config: RunConfig) -> np.ndarray:
    """Values minus their group's mean; over its standard deviation where that is asked for."""
    centred = groups.centred(values)
    return centred / (groups.stds(values)[groups.of_row] + 1e-6) if config.advantage.normalize_by_std else centred
