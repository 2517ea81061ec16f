"""How far the stage of this process is, counted in steps (decoded tokens, samples, micro-batches).

A rank runs one stage at a time, on its actor's thread; `RankActor.ping` reads the counts from another one, and an
engine's launcher sends its own along with its heartbeat.
"""

from __future__ import annotations


class StageProgress:
    """Steps done of a pass over the stage's rows; a stage of several passes counts each of them anew."""

    def __init__(self) -> None:
        self.counts = (0, 0)
        """Done, in all; one tuple, so that a reader never sees half a change."""

    def begin(self, total: int) -> None:
        """A pass of `total` steps begins; 0: nothing is known."""
        self.counts = (0, total)

    def step(self) -> None:
        self.at(self.counts[0] + 1)

    def at(self, done: int) -> None:
        """So many steps of the pass are done."""
        self.counts = (done, self.counts[1])

    @property
    def share(self) -> float | None:
        """From 0 to 1; None where nothing is known."""
        done, total = self.counts
        return min(1.0, done / total) if total else None


STAGE = StageProgress()
"""Of the stage that this process runs."""
