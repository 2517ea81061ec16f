"""What held-out samples say: mean@n, pass@k, best@k, maj@n of P prompts with n samples each, and intervals.

Every estimator gives a number per prompt, float64 [P]; the prompts are what was drawn at random, so that
intervals are over them, however much the samples of one prompt resemble one another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from pipeline.rollouts import Array

Z95 = 1.959963984540054
NUM_RESAMPLES = 2000
T95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""Student's t of 97.5 % for 1 to 10 degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over prompts with its 95 % interval; NaN bounds where there is no saying: one prompt, or values that are
    all the same and not 0 or 1."""

    mean: float
    low: float
    high: float

    def metrics(self, name: str) -> dict[str, float]:
        """`name`, `name_low`, `name_high`."""
        return {name: self.mean, f"{name}_low": self.low, f"{name}_high": self.high}


def mean_at_n(scores: Array) -> Array:
    """Mean of each prompt's samples; scores float [P, n]."""
    return np.asarray(np.asarray(scores, dtype=np.float64).mean(axis=1))


def pass_at_k(passed: Array, k: int) -> Array:
    """Probability that one of k samples passes, without bias from n >= k of them, of which c pass:
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1); passed bool [P, n]."""
    num_samples = _checked(passed.shape[1], k)
    whole = math.comb(num_samples, k)
    return np.array([1.0 - math.comb(num_samples - int(c), k) / whole for c in passed.sum(axis=1)])


def best_at_k(scores: Array, k: int) -> Array:
    """Expected highest score of k samples, over all choices of k of the n: the i-th smallest is the highest of
    C(i - 1, k - 1) of the C(n, k) choices; scores float [P, n]."""
    num_samples = _checked(scores.shape[1], k)
    whole = math.comb(num_samples, k)
    weights = np.array([math.comb(i, k - 1) / whole for i in range(num_samples)])
    return np.asarray(np.sort(np.asarray(scores, dtype=np.float64), axis=1) @ weights)


def majority_at_n(scores: Array, answers: Sequence[Sequence[str | None]]) -> Array:
    """Score of the answer that most samples of a prompt give; scores float [P, n], answers [P][n].

    The score of an answer is the mean over the samples that give it; a tie is the mean over the answers that
    lead. None is no answer and no vote; a prompt without any vote scores 0.
    """
    return np.array([_majority(row, given) for row, given in zip(scores, answers, strict=True)], dtype=np.float64)


def _majority(scores: Array, answers: Sequence[str | None]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    leading = [answer for answer, count in votes.items() if count == most]
    means = [np.mean([s for s, a in zip(scores, answers, strict=True) if a == answer]) for answer in leading]
    return float(np.mean(means))


def estimate(values: Array, *, seed: int = 0) -> Estimate:
    """Mean over prompts and its 95 % interval; values float [P].

    Wilson's score interval (Wilson 1927) where every value is 0 or 1: it has a width also where all are equal.
    Otherwise the bootstrap over prompts, a function of `seed`; NaN for one prompt, and where all values are the same.
    """
    values = np.asarray(values, dtype=np.float64)
    if not len(values):
        return Estimate(mean=math.nan, low=math.nan, high=math.nan)
    mean = float(values.mean())
    if np.isin(values, (0.0, 1.0)).all():
        low, high = wilson(int(values.sum()), len(values))
    elif np.ptp(values) == 0:
        low = high = math.nan
    else:
        low, high = bootstrap(values, seed=seed)
    return Estimate(mean=mean, low=low, high=high)


def num_right(margins: Array) -> float:
    """Sum of 1 for each margin above 0 and a half for each of 0, as `pipeline.losses.base.rightness`; float [N]."""
    return float(np.heaviside(margins, 0.5).sum())


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """95 % score interval of a proportion."""
    share, squared = successes / trials, Z95 * Z95 / trials
    centre = (share + squared / 2) / (1 + squared)
    half = Z95 / (1 + squared) * math.sqrt(share * (1 - share) / trials + squared / (4 * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap(values: Array, *, seed: int) -> tuple[float, float]:
    """Expanded percentile interval (Hesterberg 2015, arXiv 1411.5279, section 4.1) of the mean, 2000 resamples.

    The points of the mean over resampled prompts that are as far out as Student's t is for so few: 2.5 % and 97.5 % of
    them are too narrow an interval, by a third for 5 prompts.
    """
    rng = np.random.default_rng(seed)
    means = np.empty(NUM_RESAMPLES)
    for start in range(0, NUM_RESAMPLES, 100):  # 100 rows at a time: large data sets stay small in memory
        chosen = rng.integers(len(values), size=(min(100, NUM_RESAMPLES - start), len(values)))
        means[start : start + len(chosen)] = values[chosen].mean(axis=1)
    tail = 100 * NormalDist().cdf(-math.sqrt(len(values) / (len(values) - 1)) * student_t(len(values) - 1))
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


def student_t(degrees: int) -> float:
    """Its point of 97.5 %; beyond the table the expansion in 1 / degrees (Abramowitz and Stegun 26.7.5)."""
    if degrees <= len(T95):
        return T95[degrees - 1]
    first = (Z95**3 + Z95) / 4
    second = (5 * Z95**5 + 16 * Z95**3 + 3 * Z95) / 96
    third = (3 * Z95**7 + 19 * Z95**5 + 17 * Z95**3 - 15 * Z95) / 384
    return Z95 + first / degrees + second / degrees**2 + third / degrees**3


def summary(
    scores: Array,
    answers: Sequence[Sequence[str | None]],
    *,
    ks: Sequence[int] = (),
    pass_score: float = 1.0,
) -> dict[str, float]:
    """Every estimator with its interval: `mean@n`, `maj@n`, and `pass@k`, `best@k` for n and each of ks.

    A sample passes with a score of at least pass_score, which is given back as `pass_score`. scores float [P, n].
    Raises ValueError for a k above n.
    """
    num_samples = scores.shape[1]
    passed = np.asarray(scores) >= pass_score
    metrics = {
        "pass_score": pass_score,
        **estimate(mean_at_n(scores)).metrics(f"mean@{num_samples}"),
        **estimate(majority_at_n(scores, answers)).metrics(f"maj@{num_samples}"),
    }
    for k in sorted({*ks, num_samples}):
        metrics |= estimate(pass_at_k(passed, k)).metrics(f"pass@{k}")
        metrics |= estimate(best_at_k(scores, k)).metrics(f"best@{k}")
    return metrics


def _checked(num_samples: int, k: int) -> int:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}, with {num_samples} samples of a prompt; it has to be from 1 to {num_samples}")
    return num_samples
