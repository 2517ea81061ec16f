"""The `code` reward: runs a response's Python code in the sandbox against the answer's cases or asserts."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workers.sandbox import Program, SandboxLimits, SandboxOutcome, run_program

FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)

HARNESS = """
import io, json, os, sys
task = json.load(sys.stdin)
sys.stdin = io.StringIO()
names = {"__name__": "solution"}
exec(compile(task.pop("code"), "solution.py", "exec"), names)
exec(compile(task.pop("tests"), "tests.py", "exec"), names)
sys.stdout.flush()
os.write(1, task["token"].encode())
"""
"""Runs the asserts after the code. The token on its output says that the end was reached."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """stdin and the output that is expected; or tests: source that raises where the code is wrong."""

    stdin: str = ""
    stdout: str = ""
    tests: str | None = None


def code(
    prompt: str,
    response: str,
    answer: Any,
    *,
    partial: bool = False,
    time_s: float = 4.0,
    total_s: float = 8.0,
    memory_mib: int = 512,
    processes: int = 4,
    disk_mib: int = 64,
    output_kib: int = 1024,
    packages: bool = False,
) -> dict[str, float]:
    """1 when the code passes every case (partial: the share that it passes).

    answer: asserts (a text or a list of texts, or under `tests`), or cases {"inputs": [...], "outputs": [...]}
    or [{"input": ..., "output": ...}, ...], of which each is a run of its own and compared line by line, space at
    the ends aside. A JSON text of these counts as well. time_s: of a case; total_s: of all (keep it below
    `timeout_s`). Whatever the code does, and every limit that it meets, is a case that it fails. Parts: `passed`,
    `stopped` (cases ended by the limit of time or output). Raises ValueError for an answer of another form,
    SandboxError where the isolation fails.
    """
    cases, source = cases_of(answer), extract_code(response)
    limits = SandboxLimits(
        time_s=time_s, memory_mib=memory_mib, processes=processes, file_mib=disk_mib, disk_mib=disk_mib,
        output_kib=output_kib,
    )  # fmt: skip
    passed, stopped, deadline = 0, 0, time.monotonic() + total_s
    for case in cases:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        ok, outcome = _run(source, case, replace(limits, time_s=min(time_s, left_s)), packages)
        passed += ok
        stopped += outcome.stopped is not None
        if not ok and not partial:
            break
    score = passed / len(cases) if partial else float(passed == len(cases))
    return {"score": score, "passed": float(passed), "stopped": float(stopped)}


def extract_code(response: str) -> str:
    """The last fenced block that is marked as Python, else the last one, else the whole response."""
    blocks: list[tuple[str, str]] = FENCE.findall(response)
    python = [text for language, text in blocks if language.lower() in ("python", "python3", "py")]
    return (python or [text for _, text in blocks] or [response])[-1]


def cases_of(answer: Any) -> list[Case]:
    """The cases of an answer, at least one; raises ValueError for a form that is none of the known ones."""
    if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(json.JSONDecodeError):  # source may begin with a bracket
            answer = json.loads(answer)
    if isinstance(answer, Mapping) and "tests" in answer:
        answer = answer["tests"]
    found: list[Case] = []
    if isinstance(answer, str):
        found = [Case(tests=answer)]
    elif isinstance(answer, Mapping) and {"inputs", "outputs"} <= set(answer):
        pairs = zip(answer["inputs"], answer["outputs"], strict=True)
        found = [Case(stdin=_lines(given), stdout=_lines(wanted)) for given, wanted in pairs]
    elif isinstance(answer, Sequence):
        found = [_case(one) for one in answer]
    if not found or any(case.tests is not None and not case.tests.strip() for case in found):
        raise ValueError(
            "code needs an answer with tests: asserts as text, {'inputs': [...], 'outputs': [...]} or a list of "
            f"{{'input', 'output'}}; this one is {json.dumps(answer, default=str)[:80]}"
        )
    return found


def _case(one: Any) -> Case:
    if isinstance(one, Mapping):
        for given, wanted in (("input", "output"), ("stdin", "stdout")):
            if given in one and wanted in one:
                return Case(stdin=_lines(one[given]), stdout=_lines(one[wanted]))
        raise ValueError(f"a case of the answer has {', '.join(map(str, one)) or 'nothing'}, not input and output")
    return Case(tests=str(one))


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _run(source: str, case: Case, limits: SandboxLimits, packages: bool) -> tuple[bool, SandboxOutcome]:
    if case.tests is None:
        program = Program(files={"main.py": source}, stdin=case.stdin, packages=packages, limits=limits)
        outcome = run_program(program)
        return _ended_well(outcome) and _same_lines(outcome.stdout, case.stdout), outcome
    token = secrets.token_hex(16)
    task = json.dumps({"code": source, "tests": case.tests, "token": token})
    outcome = run_program(Program(files={"main.py": HARNESS}, stdin=task, packages=packages, limits=limits))
    return _ended_well(outcome) and outcome.stdout.endswith(token), outcome


def _ended_well(outcome: SandboxOutcome) -> bool:
    return outcome.status == 0 and outcome.stopped is None


def _same_lines(given: str, wanted: str) -> bool:
    def stripped(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    return stripped(given) == stripped(wanted)
