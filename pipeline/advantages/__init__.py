"""From rewards to advantages, on the controller: numpy in float64, no forward pass.

Only response tokens (response_mask == 1) take part. Tokens between them, such as a tool's answer in a
conversation of several turns, are stepped over as if they were not there: they get no advantage, and
nothing bootstraps from their values. Shapes: B sequences, T tokens, packed.
"""

from pipeline.advantages.compute import AdvantageResult, compute_advantages
from pipeline.advantages.estimators import discounted_gae, gae, reinforce_pp, whitened
from pipeline.advantages.group_estimators import best_of_n, group, reinforce_pp_baseline, rloo
from pipeline.advantages.groups import Groups, checked_groups
from pipeline.advantages.remax import remax
from pipeline.advantages.safe_rlhf import safe_gae
from pipeline.advantages.tokens import ESTIMATORS, Estimate, Estimator, ResponseTokens, register_estimator

__all__ = [
    "ESTIMATORS",
    "AdvantageResult",
    "Estimate",
    "Estimator",
    "Groups",
    "ResponseTokens",
    "best_of_n",
    "checked_groups",
    "compute_advantages",
    "discounted_gae",
    "gae",
    "group",
    "register_estimator",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "safe_gae",
    "whitened",
]
