"""What benchmarks/recovery.py makes of runs that went as told."""

from __future__ import annotations

from pathlib import Path

from benchmarks.recovery import missed, row, table, verdict
from flows.run import RunSummary
from tests.faults.cases import CALL_TIMEOUT_S, Case
from tests.faults.strike import Struck

FIRST = ("actor.generate_sequences[0]", "critic.update_critic[0]", "actor.generate_sequences[1]")


def struck(case: Case, names: tuple[str, ...], *, resumed_at: float | None = None, seconds: float = 5.0) -> Struck:
    """One stage a second, from 0; the fault strikes half a second into the third."""
    recovery = {
        "noticed_at": 2.75, "seconds": seconds, "repeated": ["critic.update_critic[0]"], "replayed": [0],
        "sentence": "rank 1 was lost",
    }  # fmt: skip
    summary = RunSummary(run_dir="runs/x", status="completed", iterations=2, recoveries=[recovery])
    return Struck(
        case=case,
        run_dir=Path("runs/x"),
        summary=summary if resumed_at is None else None,
        begun=tuple((name, float(at)) for at, name in enumerate(names)),
        struck_at=2.5,
        resumed_at=resumed_at,
    )


def test_a_recovery_counts_from_the_fault() -> None:
    case = Case(fault="kill", stage="generate")
    measured = row(case, struck(case, (*FIRST, "critic.update_critic[0]", "actor.generate_sequences[1]")))
    assert measured["notice_s"] == 0.25 and measured["running_again_s"] == 5.25
    assert measured["stages_again"] == 1 and measured["iterations_replayed"] == 1
    assert measured["generations_repeated"] == 0 and not missed(measured)


def test_a_resume_counts_from_its_start_to_the_stage_that_was_cut_off() -> None:
    case = Case(fault="controller", stage="generate")
    again = (*FIRST, "critic.update_critic[0]", "actor.generate_sequences[1]", "critic.update_critic[1]")
    measured = row(case, struck(case, again, resumed_at=2.9))
    assert round(measured["running_again_s"], 6) == 1.1
    assert measured["stages_again"] == 1 and measured["iterations_replayed"] == 1
    assert "notice_s" not in measured and measured["goal_s"] == 15


def test_what_is_slower_than_its_goal_or_repeats_a_generation_is_missed() -> None:
    hang, update = Case(fault="hang", stage="prepare"), Case(fault="kill", stage="update")
    slow = row(hang, struck(hang, FIRST, seconds=CALL_TIMEOUT_S + 12))
    twice = row(update, struck(update, (*FIRST, "actor.generate_sequences[0]")))
    assert missed(slow) and missed(twice) and twice["generations_repeated"] == 1
    lines = table([slow, twice]).splitlines()
    assert lines[2] == "| hang | prepare | 0.2 | 18.2 | 18.0 | 1 | 1 | 0 |"
    assert len({line.count("|") for line in lines}) == 1
    said = verdict([slow], ["kill-commit"], 61.2)
    assert said.startswith("Goals missed: hang-prepare, kill-commit; the command ran for 61 s")
    assert verdict([], [], 1).startswith("Goals missed: none;")
