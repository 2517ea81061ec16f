"""Which rollouts a run still needs, and the removal of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from storage.checkpoints import CheckpointStore
from storage.rollout_store import RolloutStore


def removable(
    iterations: Sequence[int], *, keep_last: int, keep_every: int | None, resumed_from: int | None
) -> list[int]:
    """Those of the stored iterations, ascending, that may go.

    keep_last: so many of the newest stay. keep_every: of the others, those whose number it divides stay too.
    resumed_from: step of the oldest checkpoint that a resume may start from, which replays the iterations from
    that number on; None: there is none, and everything is replayed.
    """
    if resumed_from is None:
        return []
    newest = set(sorted(iterations)[-keep_last:])
    return [
        iteration
        for iteration in sorted(iterations)
        if iteration < resumed_from
        and iteration not in newest
        and not (keep_every is not None and iteration % keep_every == 0)
    ]


@dataclass(frozen=True, kw_only=True)
class RolloutRetention:
    """Removes rollouts after a checkpoint. The best checkpoint does not count: no resume starts from it."""

    rollouts: RolloutStore
    checkpoints: CheckpointStore
    keep_last: int
    keep_every: int | None

    def apply(self, newest: int) -> list[int]:
        """The iterations whose rollouts were removed after the checkpoint `newest`.

        Later checkpoints are damaged, and no resume starts from them. Raises StorageError when the disk refuses.
        """
        committed = [checkpoint.step for checkpoint in self.checkpoints.committed()]
        steps = [step for step in committed if step <= newest][-self.checkpoints.keep_last :]
        gone = removable(
            self.rollouts.folders(),
            keep_last=self.keep_last,
            keep_every=self.keep_every,
            resumed_from=min(steps, default=None),
        )
        for iteration in gone:
            self.rollouts.discard(iteration)
        return gone
