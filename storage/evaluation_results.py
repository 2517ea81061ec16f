"""What a run's evaluations gave, from its metrics: for the run's own output, its summary and its status."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

EVAL, BEFORE = "eval/", "eval_before/"
"""Prefixes of an evaluation's metrics. `eval_before/`: of the one before the first update, where iteration 0 has
another one after it."""
STEP = "eval/step"
VALIDATION = ""
SHOWN = ("mean@", "pass@", "accuracy", "sign_accuracy", "perplexity")
"""Beginnings of the estimates that are said in a sentence, in this order."""
OVER_PROMPTS = ("mean@", "pass@", "maj@", "best@")
PART = re.compile(r"reward/.*_mean(_low|_high)?")
"""Parts of the reward, whose names have a slash as those of data sets do."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """One evaluation. step: iterations before it. datasets: metrics by the data set's name, of `data.validation`
    under the empty name."""

    step: int
    datasets: Mapping[str, Mapping[str, float]]

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "datasets": {name or "validation": dict(m) for name, m in self.datasets.items()}}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Evaluated:
        named = {("" if name == "validation" else name): metrics for name, metrics in document["datasets"].items()}
        return cls(step=document["step"], datasets=named)

    def sentence(self) -> str:
        """`evaluation after 20 iterations: mean@4 0.52 (0.48 to 0.56), pass@4 0.8 (0.71 to 0.87)`."""
        when = "before training" if not self.step else f"after {self.step} iteration{'s' * (self.step > 1)}"
        parts = [f"{f'{name}: ' * bool(name)}{_estimates(metrics)}" for name, metrics in self.datasets.items()]
        return f"evaluation {when}: {'; '.join(parts)}"


def evaluated(metrics: Mapping[str, Any], *, step: int, prefix: str = EVAL) -> Evaluated | None:
    """The evaluation among the metrics; None where there is none."""
    datasets: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        if not key.startswith(prefix) or key == STEP or not isinstance(value, int | float):
            continue
        name = key.removeprefix(prefix)
        dataset, _, inner = name.partition("/")
        if PART.fullmatch(name) or not inner:
            dataset, inner = VALIDATION, name
        datasets.setdefault(dataset, {})[inner] = float(value)
    return Evaluated(step=step, datasets=datasets) if datasets else None


def evaluations_of(lines: Iterable[Mapping[str, Any]]) -> list[Evaluated]:
    """Of a run's metrics, in their order."""
    found = []
    for line in lines:
        if "iteration" not in line:
            continue
        iteration = int(line["iteration"])
        # a run of an earlier version has no step: it evaluated before iteration 0, and after the others
        step = int(line.get(STEP, iteration + bool(iteration)))
        found += [evaluated(line, step=0, prefix=BEFORE), evaluated(line, step=step)]
    return [entry for entry in found if entry is not None]


def first_and_last(entries: list[Evaluated]) -> list[Evaluated]:
    """What a run began with, and what it came to."""
    return entries[:1] + entries[1:][-1:]


def evaluation_lines(documents: Iterable[Mapping[str, Any]]) -> list[str]:
    """Sentences of evaluations that were written as JSON types."""
    return [Evaluated.from_json(document).sentence() for document in documents]


def _estimates(metrics: Mapping[str, float]) -> str:
    names = [name for start in SHOWN for name in metrics if name.startswith(start) and _is_estimate(name)]
    return ", ".join(_estimate(metrics, name) for name in names or list(metrics)[:3])


def _is_estimate(name: str) -> bool:
    return not name.endswith(("_low", "_high"))


def _estimate(metrics: Mapping[str, float], name: str) -> str:
    passes = "pass_score" in metrics and name.startswith("pass@")
    remarks = [between(metrics, name), f"a pass: score {metrics['pass_score']:.3g} or more" if passes else ""]
    said = "; ".join(filter(None, remarks))
    return f"{name} {metrics[name]:.3g}" + (f" ({said})" if said else "")


def between(metrics: Mapping[str, Any], name: str) -> str:
    """`0.48 to 0.56`; why an estimate has no interval; nothing of what never has one."""
    low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
    if low is not None and high is not None and math.isfinite(low) and math.isfinite(high):
        return f"{low:.3g} to {high:.3g}"
    prompts = metrics.get("prompts")
    if prompts is None or not name.startswith(OVER_PROMPTS):
        return ""
    return "one prompt: no interval" if prompts == 1 else f"the same for all {prompts:.0f} prompts: no interval"
