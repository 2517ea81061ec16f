"""What Prefect is given of a stage."""

from __future__ import annotations

from typing import Any

from prefect.utilities.collections import visit_collection

from flows.stage_tasks import Ended
from pipeline.stages import StageOutcome


def test_prefect_remembers_no_part_of_an_outcome() -> None:
    """It remembers by `id` what it can visit, and takes what has that memory later for it: an edge too many."""

    def visited(result: object) -> list[object]:
        seen: list[object] = []

        def see(found: Any) -> Any:
            seen.append(found)
            return found

        visit_collection(result, visit_fn=see, max_depth=1)
        return seen

    outcome = StageOutcome(num_rows=1, columns={"reward": "reward"})
    ended = Ended(outcome)
    assert outcome.columns in visited(outcome)
    assert visited(ended) == [ended]
