"""Where a run that was stopped goes on, in a sentence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pipeline.trace import TracedCall


def resume_point(calls: Sequence[TracedCall], stored: Mapping[int, Collection[str]], *, step: int, total: int) -> str:
    """The checkpoint, which iterations are replayed from stored rollouts, and the first stage that is computed anew.

    calls: an iteration's, in their order. stored: committed stages by iteration. step: of the newest checkpoint, that
    is, iterations before it; 0: none.
    """
    done, names = step, [call.stage for call in calls]
    while done < total and set(names) <= set(stored.get(done, ())):
        done += 1
    origin = f"checkpoint {step}" if step else "the initial weights (there is no checkpoint yet)"
    parts = [_replayed(step, done, calls)] if done > step else []
    parts.append(_next(done, names, stored.get(done, ())) if done < total else "then the last checkpoint is saved")
    return f"going on from {origin}: {', '.join(parts)}"


def _replayed(first: int, end: int, calls: Sequence[TracedCall]) -> str:
    updates = ", ".join(call.stage for call in calls if call.kind == "state")
    which = f"iteration {first} is" if end == first + 1 else f"iterations {first} to {end - 1} are"
    return f"{which} replayed from stored rollouts ({updates})"


def _next(iteration: int, names: Sequence[str], stored: Collection[str]) -> str:
    missing = next(name for name in names if name not in stored)
    if missing == names[0]:
        return f"iteration {iteration} begins"
    return f"iteration {iteration} goes on at {missing}, what is before it comes from the store"
