"""status and timeline of runs that go on, ended or died, from another process's point of view."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flows.cli import main
from flows.commands.status import seconds_per_iteration, status
from storage.errors import StorageError
from storage.metrics import MetricsLog
from storage.run_directory import RunDirectory
from storage.run_status import ActiveStage, PlacedRank, RunStatus, read_status, write_status
from storage.timeline import Span, append_spans, chrome_trace, read_timeline
from tests.flows.stored_run import stored_run
from tests.flows.test_cli import Capture, document_of

HOLDER = """
import fcntl, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print(1, flush=True)
time.sleep(60)
"""


def running(run: RunDirectory, *, now: float) -> RunStatus:
    stage = ActiveStage(
        stage="actor.generate_sequences", iteration=2, role="actor", pool="main", ranks=(0,), since=now - 7
    )
    ranks = tuple(
        PlacedRank(rank=rank, pool="main", address=f"tcp://h:{rank}", roles=("actor", "critic"), peak_gib=1.5)
        for rank in (0, 1)
    )
    written = RunStatus(
        state="running", pid=4321, host="h", started_at=now - 100, updated_at=now - 7, iterations_total=10,
        iterations_done=2, ranks=ranks, stages=(stage,),
    )  # fmt: skip
    write_status(run.path, written)
    return written


def test_a_running_run_is_seen_from_outside_and_a_killed_one_too(tmp_path: Path, capsys: Capture) -> None:
    run, now = stored_run(tmp_path), time.time()
    running(run, now=now)
    log = MetricsLog(run.metrics)
    for iteration in (0, 1):
        log.append(
            iteration,
            {
                "ended_at": now - 20 + 10 * iteration,
                "reward_mean": 0.5,
                "time/iteration": 9.0,
                "eval/mean@1": iteration,
            },
        )
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.path / ".lock")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "1\n"
        found = status(str(run.path), tmp_path, now=now).document
    finally:
        holder.kill()
        holder.wait()
    assert (found["state"], found["iterations"]) == ("running", {"done": 2, "total": 10})
    assert found["expected_end"] == pytest.approx(now - 10 + 8 * 10), "from the last iteration's end"
    busy, idle = found["ranks"]
    assert (busy["model"], busy["phase"], busy["iteration"]) == ("actor", "actor.generate_sequences", 2)
    assert busy["seconds"] == pytest.approx(7) and busy["peak_gib"] == 1.5 and busy["models"] == ["actor", "critic"]
    assert idle["phase"] is None
    dead = document_of(capsys, "status", str(run.path))
    assert (dead["state"], dead["expected_end"], dead["ranks"][0]["phase"]) == ("died", None, None)
    assert main(["status", str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert "died, 2 of 10 iterations" in printed and "pid 4321 on h) is gone" in printed
    assert "hybridflow resume" in printed and "iteration 1  reward 0.5" in printed
    assert "evaluation before training: mean@1 0\nevaluation after 2 iterations: mean@1 1\n" in printed


@pytest.mark.parametrize("state", ["completed", "stopped", "failed"])
def test_an_ended_run_says_how(tmp_path: Path, capsys: Capture, state: str) -> None:
    run = stored_run(tmp_path, iterations=1)
    ended = replace(running(run, now=time.time()), state=state, stages=(), error="boom" if state == "failed" else None)
    write_status(run.path, ended)
    found = document_of(capsys, "status", str(run.path))
    assert (found["state"], found["error"], found["expected_end"]) == (state, ended.error, None)
    assert [rank["alive"] for rank in found["ranks"]] == [False, False]
    assert main(["status", str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert "ended" in printed and "idle" not in printed


def test_a_run_that_never_started_and_a_damaged_file(tmp_path: Path, capsys: Capture) -> None:
    run = stored_run(tmp_path, iterations=1)
    assert document_of(capsys, "status", str(run.path))["state"] == "not started"
    for text in ("{", "[]", "{}", '{"ranks": [{}], "stages": []}', '{"ranks": 3}'):
        (run.path / "status.json").write_text(text)
        with pytest.raises(StorageError, match=r"status\.json cannot be read"):
            read_status(run.path)


def test_a_pause_between_executions_is_no_pace() -> None:
    ends = [0.0, 10.0, 20.0, 10_000.0, 10_010.0, 10_020.0]
    assert seconds_per_iteration([{"ended_at": end} for end in ends]) == 10
    assert seconds_per_iteration([{"iteration": 0, "time/iteration": 3.0}]) == 3
    assert seconds_per_iteration([]) is None


def spans(iteration: int, start: float) -> list[Span]:
    return [
        Span(iteration=iteration, stage=stage, pool=pool, rank=rank, start=start + begin, end=start + end, peak_gib=0.5)
        for stage, pool, rank, begin, end in (
            ("actor.generate_sequences", "a", 0, 0.0, 2.0),
            ("actor.generate_sequences", "a", 1, 0.0, 1.5),
            ("critic.compute_values", "b", 2, 2.0, 3.0),
            ("actor.update_actor", "a", 0, 3.0, 5.0),
        )
    ]


def test_a_timeline_is_a_chrome_trace_and_a_picture(tmp_path: Path, capsys: Capture) -> None:
    run = stored_run(tmp_path, iterations=1)
    append_spans(run.path, spans(0, 100.0))
    append_spans(run.path, spans(1, 200.0))
    append_spans(run.path, spans(1, 300.0))  # computed again after a failure
    document = document_of(capsys, "timeline", str(run.path))
    assert (document["iteration"], document["seconds"], len(document["spans"])) == (1, 5.0, 4)
    assert Path(document["picture"]).read_bytes().startswith(b"\x89PNG")
    trace = json.loads(Path(document["trace"]).read_text())
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"], e["tid"]) for e in complete] == [
        ("actor.generate_sequences", 0.0, 2e6, 0),
        ("actor.generate_sequences", 0.0, 1.5e6, 1),
        ("critic.compute_values", 2e6, 1e6, 2),
        ("actor.update_actor", 3e6, 2e6, 0),
    ]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert all(named[event["pid"], event["tid"]] == f"rank {event['tid']}" for event in complete)
    elsewhere = document_of(capsys, "timeline", str(run.path), "-i", "0", "--output", str(tmp_path / "out"))
    assert Path(elsewhere["trace"]).parent == tmp_path / "out" and elsewhere["iteration"] == 0
    assert main(["timeline", str(run.path), "--output", str(run.path / "rollouts")]) == 2
    assert "lies in the run directory" in capsys.readouterr().err
    assert main(["timeline", str(run.path), "--iteration", "9"]) == 2
    assert "--iteration 9: no stage of it was recorded; the last one recorded is 1" in capsys.readouterr().err


def test_a_torn_line_is_dropped_and_a_damaged_one_named(tmp_path: Path, capsys: Capture) -> None:
    run = stored_run(tmp_path, iterations=1)
    assert main(["timeline", str(run.path)]) == 2
    assert "no stage of the run has ended yet" in capsys.readouterr().err
    append_spans(run.path, spans(0, 1.0))
    path = run.path / "timeline.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert len(read_timeline(run.path)) == 3
    append_spans(run.path, spans(1, 9.0))
    assert len(read_timeline(run.path)) == 7
    assert chrome_trace([], run="r")["traceEvents"] == []
    for line in ("{}", "[1]", "x", '{"iteration": 0, "stage": "s", "pool": "p", "rank": "x", "start": 1, "end": 2}'):
        path.write_text(line + os.linesep)
        with pytest.raises(StorageError, match=r"timeline\.jsonl line 1"):
            read_timeline(run.path)
