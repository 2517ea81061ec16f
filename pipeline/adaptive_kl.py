"""The controller of the KL coefficient. Importable without torch: the single controller holds it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.
MAX_RELATIVE_ERROR = 0.2


@dataclass(frozen=True, kw_only=True)
class AdaptiveKl:
    """The KL coefficient; its whole state, so saving the object saves the controller.

    target: mean KL of a sequence aimed at, None: the coefficient is fixed. horizon: samples over which
    the coefficient changes by a factor of e^0.2 at most.
    """

    coef: float
    target: float | None = None
    horizon: int = 10_000

    def updated(self, kl: float, num_samples: int) -> AdaptiveKl:
        """After a batch of num_samples sequences whose mean KL was kl (Ziegler et al. 2019, section 2.2).

        The exponential keeps the coefficient positive also when a batch is longer than the horizon.
        Raises ValueError when kl is not finite.
        """
        if self.target is None:
            return self
        if not math.isfinite(kl):
            raise ValueError(f"the KL of the batch is {kl}; the coefficient {self.coef} cannot follow it")
        error = min(max(kl / self.target - 1.0, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        return replace(self, coef=self.coef * math.exp(error * num_samples / self.horizon))
