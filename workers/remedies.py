"""What may help when a stage fails: one row for each class of error.

A stage that fails with a class that is retried is run again on ranks that are built anew (in place, a survivor
of a broken collective cannot go on), from the last checkpoint and the stored rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ErrorClass = Literal["lost", "timeout", "engine", "start", "user", "memory", "diverged", "internal"]


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """retry: the run goes on by itself. advice: for the user, where it does not, or has tried often enough."""

    meaning: str
    retry: bool
    advice: str


REMEDIES: Mapping[ErrorClass, Remedy] = {
    "lost": Remedy(
        meaning="a worker process or its connection is gone",
        retry=True,
        advice="the rank's log and the system's (out of memory killer) say why; then resume",
    ),
    "timeout": Remedy(
        meaning="a rank did not answer by its deadline",
        retry=True,
        advice="raise cluster.call_timeout_s if the stage only needs longer; then resume",
    ),
    "engine": Remedy(
        meaning="a rollout engine died, also after it was started again",
        retry=True,
        advice="the engine's log says why; then resume",
    ),
    "start": Remedy(
        meaning="a rollout engine cannot start: a module, a file or an argument of it is wrong",
        retry=False,
        advice="mend what the line names; then resume",
    ),
    "user": Remedy(meaning="configuration or data", retry=False, advice="mend what the line names; then resume"),
    "memory": Remedy(
        meaning="a device or the host has too little memory",
        retry=False,
        advice="lower training.max_tokens_per_micro_batch or rollout.max_batch_tokens, set "
        "ROLE.fsdp.gradient_checkpointing or ROLE.fsdp.offload, or use more ranks; then resume",
    ),
    "diverged": Remedy(
        meaning="too many steps in a row had a non-finite gradient",
        retry=False,
        advice="lower ROLE.optimizer.lr or loosen ROLE.optimizer.max_nonfinite_steps; then resume",
    ),
    "internal": Remedy(
        meaning="everything else",
        retry=False,
        advice="the log has the traceback",
    ),
}
