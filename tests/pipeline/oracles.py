"""The formulas of docs/algorithms.md by brute force: plain Python loops over floats, nothing shared with the code.

A batch is a list of `Sequence`s; token lists cover the whole sequence, prompt and observations included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Sequence:
    """One row. mask: 1 on response tokens; the other lists align with it."""

    mask: list[int]
    reward: float
    group: int
    advantages: list[float]
    old: list[float]
    engine: list[float]
    reference: list[float]
    values: list[float]
    returns: list[float]

    @property
    def kept(self) -> list[int]:
        return [t for t in range(len(self.mask)) if self.mask[t]]


Batch = list[Sequence]
PerToken = list[list[float]]


def estimate_kl(kind: str, log_ratio: float) -> float:
    return {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": math.exp(-log_ratio) - 1 + log_ratio}[kind]


# Advantages


def token_rewards(batch: Batch, kl: str | None, coef: float) -> PerToken:
    rewards = []
    for row in batch:
        mine = [0.0] * len(row.mask)
        for t in row.kept:
            mine[t] = -coef * estimate_kl(kl, row.old[t] - row.reference[t]) if kl else 0.0
        if row.kept:
            mine[row.kept[-1]] += row.reward
        rewards.append(mine)
    return rewards


def with_step_rewards(batch: Batch, steps: PerToken, weight: float) -> PerToken:
    """Rewards of the actions where they were given, the rest of the sequence's reward at its last response token."""
    rewards = []
    for row, mine in zip(batch, steps, strict=True):
        paid = [weight * mine[t] if m else 0.0 for t, m in enumerate(row.mask)]
        if row.kept:
            paid[row.kept[-1]] += row.reward - sum(paid)
        rewards.append(paid)
    return rewards


def sums(batch: Batch, rewards: PerToken) -> list[float]:
    """A row without a response keeps its reward."""
    return [sum(mine) if row.kept else row.reward for row, mine in zip(batch, rewards, strict=True)]


def spread(batch: Batch, numbers: list[float]) -> PerToken:
    return [[numbers[b] if m else 0.0 for m in row.mask] for b, row in enumerate(batch)]


def others(batch: Batch, b: int) -> list[int]:
    return [c for c in range(len(batch)) if batch[c].group == batch[b].group]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def whiten(batch: Batch, per_token: PerToken) -> PerToken:
    flat = [per_token[b][t] for b, row in enumerate(batch) for t in row.kept]
    if len(flat) < 2:
        return per_token
    centre = mean(flat)
    deviation = math.sqrt(mean([(x - centre) ** 2 for x in flat]))
    return [
        [(per_token[b][t] - centre) / (deviation + 1e-6) if m else 0.0 for t, m in enumerate(row.mask)]
        for b, row in enumerate(batch)
    ]


def gae(batch: Batch, rewards: PerToken, gamma: float, lam: float) -> PerToken:
    """The double sum over deltas."""
    result = []
    for row, mine in zip(batch, rewards, strict=True):
        kept, advantages = row.kept, [0.0] * len(row.mask)
        for i, t in enumerate(kept):
            for j in range(i, len(kept)):
                following = row.values[kept[j + 1]] if j + 1 < len(kept) else 0.0
                advantages[t] += (gamma * lam) ** (j - i) * (mine[kept[j]] + gamma * following - row.values[kept[j]])
        result.append(advantages)
    return result


def discounted(batch: Batch, rewards: PerToken, gamma: float) -> PerToken:
    result = []
    for row, mine in zip(batch, rewards, strict=True):
        returns = [0.0] * len(row.mask)
        for i, t in enumerate(row.kept):
            returns[t] = sum(gamma**k * mine[later] for k, later in enumerate(row.kept[i:]))
        result.append(returns)
    return result


def group(batch: Batch, rewards: PerToken, *, by_std: bool) -> PerToken:
    total, numbers = sums(batch, rewards), []
    for b in range(len(batch)):
        mine = [total[c] for c in others(batch, b)]
        centre = mean(mine)
        deviation = math.sqrt(sum((x - centre) ** 2 for x in mine) / max(len(mine) - 1, 1))
        numbers.append(0.0 if len(set(mine)) == 1 else (total[b] - centre) / (deviation + 1e-6 if by_std else 1.0))
    return spread(batch, numbers)


def rloo(batch: Batch, rewards: PerToken) -> PerToken:
    total, numbers = sums(batch, rewards), []
    for b in range(len(batch)):
        rest = [total[c] for c in others(batch, b) if c != b]
        numbers.append(total[b] - mean(rest) if rest else 0.0)
    return spread(batch, numbers)


def group_baseline(batch: Batch, rewards: PerToken) -> PerToken:
    """Token rewards with the group's mean reward taken from the last response token."""
    result = [list(mine) for mine in rewards]
    for b, row in enumerate(batch):
        if row.kept:
            result[b][row.kept[-1]] -= mean([batch[c].reward for c in others(batch, b)])
    return result


def best_of_n(batch: Batch, rewards: PerToken) -> PerToken:
    total = sums(batch, rewards)
    best = {b for b in range(len(batch)) if b == max(others(batch, b), key=lambda c: (total[c], -c))}
    return spread(batch, [float(b in best) for b in range(len(batch))])


def has_variance(batch: Batch, b: int) -> bool:
    return len({batch[c].reward for c in others(batch, b)}) > 1


# Losses. `new` are the log-probabilities in training, `frozen` the same numbers where the formula takes no gradient.

TokenLoss = Callable[[Sequence, list[float], list[float], int], float]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def clipped(low: float, high: float, dual: float | None = None) -> TokenLoss:
    def loss(row: Sequence, new: list[float], frozen: list[float], t: int) -> float:
        return _pessimistic(math.exp(new[t] - row.old[t]), row.advantages[t], low, high, dual)

    return loss


def _pessimistic(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    objective = min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


def reinforce() -> TokenLoss:
    return lambda row, new, frozen, t: -row.advantages[t] * new[t]


def cispo(low: float, high: float) -> TokenLoss:
    def loss(row: Sequence, new: list[float], frozen: list[float], t: int) -> float:
        weight = clip(math.exp(frozen[t] - row.old[t]), 1 - low, 1 + high)
        return -weight * row.advantages[t] * new[t]

    return loss


def gspo(low: float, high: float) -> TokenLoss:
    def loss(row: Sequence, new: list[float], frozen: list[float], t: int) -> float:
        product = math.prod(math.exp(new[u] - row.old[u]) for u in row.kept)
        return _pessimistic(product ** (1 / len(row.kept)), row.advantages[t], low, high, None)

    return loss


def gspo_token(low: float, high: float) -> TokenLoss:
    def loss(row: Sequence, new: list[float], frozen: list[float], t: int) -> float:
        product = math.prod(math.exp(frozen[u] - row.old[u]) for u in row.kept)
        ratio = product ** (1 / len(row.kept)) * math.exp(new[t]) / math.exp(frozen[t])
        return _pessimistic(ratio, row.advantages[t], low, high, None)

    return loss


def gmpo(low: float, high: float) -> TokenLoss:
    def loss(row: Sequence, new: list[float], frozen: list[float], t: int) -> float:
        product = 1.0
        for u in row.kept:
            ratio = math.exp(new[u] - row.old[u])
            if row.advantages[u] > 0:
                ratio = min(ratio, 1 + high)
            if row.advantages[u] < 0:
                ratio = max(ratio, 1 - low)
            product *= ratio
        return -(product ** (1 / len(row.kept))) * row.advantages[t]

    return loss


def value(clip_by: float | None) -> TokenLoss:
    """`new` are the values."""

    def loss(row: Sequence, new: list[float], frozen: list[float], t: int) -> float:
        errors = [(new[t] - row.returns[t]) ** 2]
        if clip_by is not None:
            errors.append((clip(new[t], row.values[t] - clip_by, row.values[t] + clip_by) - row.returns[t]) ** 2)
        return max(errors) / 2

    return loss


def with_kl(loss: TokenLoss, kind: str, coef: float) -> TokenLoss:
    return lambda row, new, frozen, t: loss(row, new, frozen, t) + coef * estimate_kl(kind, new[t] - row.reference[t])


def with_k1(loss: TokenLoss, coef: float) -> TokenLoss:
    """The value is the log-ratio; the slope is the sum of those of this and the later tokens, which take none."""

    def term(row: Sequence, new: list[float], frozen: list[float], t: int) -> float:
        to_go = sum(frozen[u] - row.reference[u] for u in row.kept if u >= t)
        return loss(row, new, frozen, t) + coef * (frozen[t] - row.reference[t] + to_go * (new[t] - frozen[t]))

    return term


def correction_weight(row: Sequence, t: int, mode: str, level: str, cap: float) -> float:
    tokens = row.kept if level == "sequence" else [t]
    weight = math.prod(math.exp(row.old[u] - row.engine[u]) for u in tokens)
    if weight <= cap:
        return weight
    return cap if mode == "truncate" else 0.0


def corrected(loss: TokenLoss, mode: str, level: str, cap: float) -> TokenLoss:
    return lambda row, new, frozen, t: correction_weight(row, t, mode, level, cap) * loss(row, new, frozen, t)


def aggregate(batch: Batch, new: PerToken, frozen: PerToken, loss: TokenLoss, mode: str, fixed_length: int) -> float:
    answered = [b for b, row in enumerate(batch) if row.kept]
    by_row = {b: [loss(batch[b], new[b], frozen[b], t) for t in batch[b].kept] for b in answered}
    if mode == "token_mean":
        return mean([x for losses in by_row.values() for x in losses])
    per_row = {
        "sequence_mean_token_sum": lambda losses: sum(losses),
        "sequence_mean_token_mean": mean,
        "fixed_length": lambda losses: sum(losses) / fixed_length,
    }[mode]
    return mean([per_row(losses) for losses in by_row.values()])


def gradient(batch: Batch, new: PerToken, loss: TokenLoss, mode: str, fixed_length: int, h: float = 1e-6) -> PerToken:
    """Central differences in each of the new numbers; what takes no gradient stays."""
    result = []
    for b, row in enumerate(batch):
        slopes = [0.0] * len(row.mask)
        for t in row.kept:
            ends = []
            for step in (h, -h):
                moved = [list(numbers) for numbers in new]
                moved[b][t] += step
                ends.append(aggregate(batch, moved, new, loss, mode, fixed_length))
            slopes[t] = (ends[0] - ends[1]) / (2 * h)
        result.append(slopes)
    return result
