"""What the controller adapts from iteration to iteration: the KL coefficient and the cost's multiplier.

Both follow from committed metrics, so that a resumed run finds the values of an undisturbed one; their state is
saved with each checkpoint. Importable without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from configs.schema import RunConfig
from pipeline.adaptive_kl import AdaptiveKl
from pipeline.cost_multiplier import CostMultiplier
from pipeline.stages import StageOutcome

ADVANTAGES = ("actor.compute_advantages", "actor.compute_safe_advantages")
KL_SITES = {*ADVANTAGES, "actor.update_actor"}
COST_SITES = {"actor.compute_safe_advantages"}


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """kl: of the penalty against the reference. cost: Safe-RLHF's multiplier."""

    kl: AdaptiveKl
    cost: CostMultiplier

    @classmethod
    def of(cls, config: RunConfig, state: Mapping[str, Any]) -> Coefficients:
        """The checkpoint's `state` where a coefficient adapts, else the configured one, which a resume may change."""
        kl = config.kl
        coef = kl.coef if kl.target is None else float(state.get("kl_coef", kl.coef))
        log_value = state.get("log_cost_multiplier")
        return cls(
            kl=AdaptiveKl(coef=coef, target=kl.target, horizon=kl.horizon),
            cost=CostMultiplier.of(config.safety, None if log_value is None else float(log_value)),
        )

    @property
    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"kl_coef": self.kl.coef, "log_cost_multiplier": self.cost.log_value}

    def arguments(self, site: str) -> dict[str, float]:
        """What a stage at this site is told of them."""
        kl = {"kl_coef": self.kl.coef} if site in KL_SITES else {}
        return kl | ({"cost_multiplier": self.cost.value} if site in COST_SITES else {})

    def after(self, outcomes: Mapping[str, StageOutcome]) -> Coefficients:
        """After an iteration whose stages gave these outcomes. Raises ValueError for a KL or cost that is no number."""
        kl, cost = self.kl, self.cost
        for site in ADVANTAGES:
            if site in outcomes and "kl" in outcomes[site].metrics:
                kl = kl.updated(outcomes[site].metrics["kl"], outcomes[site].num_rows)
        costs = outcomes.get("cost.compute_cost")
        if costs is not None and "cost_mean" in costs.metrics:
            cost = cost.updated(costs.metrics["cost_mean"])
        return replace(self, kl=kl, cost=cost)
