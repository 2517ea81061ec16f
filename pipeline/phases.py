"""The stages of an RLHF iteration as the paper's Figure 1 names them, and which of them a call belongs to."""

from __future__ import annotations

from typing import Literal, get_args

from pipeline.calls import ModelCall

Phase = Literal["generation", "preparation", "training", "evaluation"]
"""Figure 1's three, and held-out evaluation, which it does not show."""
PHASES: tuple[Phase, ...] = get_args(Phase)


def phase_of(call: ModelCall) -> Phase:
    """Rows come into being (also by loading), columns are added to them, weights change."""
    if call.kind == "state":
        return "training"
    if call.method.startswith("evaluate"):
        return "evaluation"
    return "generation" if call.new_rows else "preparation"
