"""The Lagrange multiplier of Safe-RLHF. Importable without torch: the single controller holds it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from configs.schema import SafetyConfig


@dataclass(frozen=True, kw_only=True)
class CostMultiplier:
    """lambda, by its logarithm; its whole state, so saving the object saves the controller.

    limit: of the mean cost of a response. lr: of the ascent; 0: lambda is fixed. maximum: lambda stays at or below.
    """

    log_value: float
    lr: float
    limit: float
    maximum: float

    @classmethod
    def of(cls, safety: SafetyConfig, log_value: float | None = None) -> CostMultiplier:
        """As configured; log_value: a checkpoint's, which goes first where lambda changes at all."""
        restored = None if safety.multiplier_lr == 0 else log_value
        start = math.log(min(safety.multiplier, safety.max_multiplier)) if restored is None else restored
        return cls(log_value=start, lr=safety.multiplier_lr, limit=safety.cost_limit, maximum=safety.max_multiplier)

    @property
    def value(self) -> float:
        """lambda, above 0."""
        return math.exp(self.log_value)

    def updated(self, cost: float) -> CostMultiplier:
        """After a batch whose mean cost was `cost`: a step of gradient ascent in log lambda.

        log lambda += lr * lambda * (cost - limit), the derivative of lambda * (E[cost] - limit) by log lambda
        (Dai et al. 2023, arXiv 2310.12773, section 3.3 and its appendix): lambda rises while the mean cost is above
        its limit. Raises ValueError when the cost is not finite.
        """
        if not math.isfinite(cost):
            raise ValueError(f"the mean cost of the batch is {cost}; the multiplier {self.value} cannot follow it")
        risen = self.log_value + self.lr * self.value * (cost - self.limit)
        return replace(self, log_value=min(risen, math.log(self.maximum)))
