"""A curriculum that the policy chooses itself, after METIS (Zheng et al. 2026, arXiv 2605.11235).

A prompt teaches most where the rewards of its samples differ. The policy is asked to predict that variance for
candidate prompts, with prompts it has just been trained on, and their measured variances, as examples in its
context; the iteration takes those of the highest prediction. Where it answers with no number, the variance that was
measured last counts, or UNKNOWN for a prompt that was never seen, so that new prompts are tried early.

The paper also rewards good predictions and so trains the judgement; this file does the choice alone.
"""

import re
from collections.abc import Sequence

import numpy as np

from pipeline.sampling import SamplerView

UNKNOWN = 0.25
"""The largest variance of a reward between 0 and 1."""


def metis(view: SamplerView, candidates: int = 4, examples: int = 3) -> Sequence[int]:
    """`candidates` x batch_size prompts of the epoch are judged; all others are left for later."""
    pool = view.rows[: candidates * view.batch_size]
    questions = [question(view, int(row), examples) for row in pool]
    answers = view.ask(questions, max_new_tokens=8)
    known = np.where(np.isnan(view.history.last_variance), UNKNOWN, view.history.last_variance)
    predicted = [prediction(answer, known[row]) for answer, row in zip(answers, pool, strict=True)]
    best = np.argsort(-np.array(predicted), kind="stable")
    return [int(row) for row in pool[best]]


def question(view: SamplerView, row: int, examples: int) -> str:
    """The most recent outcomes of other prompts, then the prompt to judge."""
    order = np.argsort(-view.history.last_iteration, kind="stable")
    recent = [int(n) for n in order if view.history.last_iteration[n] >= 0 and n != row][:examples]
    shown = [f"Problem: {view.text(n)}\nVariance: {view.history.last_variance[n]:.2f}\n" for n in recent]
    head = "How much will the scores of several answers differ? 0 if all will be right, or all wrong.\n"
    return head + "".join(shown) + f"Problem: {view.text(row)}\nVariance:"


def prediction(answer: str, otherwise: float) -> float:
    """The first number of the answer, within what a variance can be."""
    number = re.search(r"\d*\.?\d+", answer)
    return min(float(number.group()), UNKNOWN) if number else float(otherwise)
