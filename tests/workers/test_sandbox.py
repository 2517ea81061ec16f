"""What code that means harm can do in the sandbox: nothing, and its sample has failed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from configs.schema import RewardFunctionConfig
from workers import sandbox
from workers.code_verifier import cases_of, code, extract_code
from workers.rewards import RewardFunctions, RewardSample
from workers.sandbox import Program, SandboxLimits, SandboxOutcome, run_program

HOME = str(Path.home())
SECRET = "a value of the environment"


def run(source: str, **limits: float) -> SandboxOutcome:
    settings = SandboxLimits(**{"time_s": 20.0, **limits})  # type: ignore[arg-type]
    return run_program(Program(files={"main.py": source}, limits=settings))


def test_this_machine_isolates() -> None:
    assert sandbox.problem() is None


ATTACKS = {
    "reads /etc/passwd": ("print(open('/etc/passwd').read())", "FileNotFoundError"),
    "reads the home directory": (f"import os; os.listdir({HOME!r}).index('.profile')", "FileNotFoundError|ValueError"),
    "reads the project": (f"print(open({__file__!r}).read())", "FileNotFoundError"),
    "opens a socket to a local server": (
        "import socket; socket.create_connection(('127.0.0.1', PORT), timeout=2)",
        "OSError: .*unreachable",
    ),
    "looks a name up": ("import socket; socket.getaddrinfo('localhost.localdomain', 80)", "gaierror"),
    "reads its parent's environment": (
        "import os; print(open(f'/proc/{os.getppid()}/environ').read())",
        "FileNotFoundError",
    ),
    "reads the reward process' environment": ("print(open('/proc/PID/environ').read())", "FileNotFoundError"),
    "kills its parent": ("import os; os.kill(os.getppid(), 9); os.kill(PID, 9)", "PermissionError|ProcessLookupError"),
    "kills everything": ("import os; os.kill(-1, 9)", "ProcessLookupError|PermissionError"),
    "writes outside": ("open('/usr/lib/harm', 'w').write('x')", "Read-only file system"),
    "writes into the runtime": (
        "import os; open(os.__file__, 'a').write('x')",
        "Read-only|Permission denied",
    ),
    "allocates 4 GB": ("x = bytearray(4 << 30); print(len(x))", "MemoryError"),
    "writes a large file": ("open('big', 'wb').write(bytes(80 << 20))", "File too large"),
    "fills the disk": ("for i in range(99): open(str(i), 'wb').write(bytes(8 << 20))", "No space left"),
    "mounts": (
        "import ctypes; l = ctypes.CDLL(None); assert l.mount(b'x', b'/work', b'tmpfs', 0, b'') == 0",
        "AssertionError",
    ),
    "makes namespaces": ("import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0", "AssertionError"),
    "traces its parent": ("import ctypes; assert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0", "AssertionError"),
    "becomes root": ("import os; os.setuid(0)", "PermissionError|OSError"),
    "changes the host's name": ("import socket; socket.sethostname('harm')", "PermissionError"),
    "makes its input grow": ("import os; os.pwrite(0, b'x', 1 << 20)", "PermissionError"),
    "has memory of its own outside of the limits": ("import os; os.memfd_create('x')", "PermissionError"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_fails(attack: str) -> None:
    source, error = ATTACKS[attack]
    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = run(source.replace("PORT", str(server.getsockname()[1])).replace("PID", str(os.getpid())))
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert outcome.status == 1 and outcome.stdout == "", outcome
    assert re.search(error, outcome.stderr.splitlines()[-1]), outcome.stderr


def test_the_attacks_do_succeed_outside(tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    for attack in ("reads /etc/passwd", "reads the project", "reads its parent's environment"):
        done = subprocess.run([sys.executable, "-c", ATTACKS[attack][0]], capture_output=True, check=False)
        assert done.returncode == 0 and done.stdout


def test_the_program_sees_no_environment_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    outcome = run("import os; print(dict(os.environ), os.getppid(), os.listdir('/'))")
    assert SECRET not in outcome.stdout and " 1 [" in outcome.stdout and outcome.status == 0


def test_a_fork_bomb_meets_the_limit_of_processes() -> None:
    bomb = (
        "import os, time\nnumber = 1\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(30)\n"
        "        number += 1\nexcept BlockingIOError: print(number, flush=True); os._exit(0)\n"
    )
    assert run(bomb, processes=5).stdout == "5\n"
    started = time.monotonic()
    outcome = run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n", time_s=1.0)
    assert outcome.stopped == "time" and time.monotonic() - started < 15


def test_running_for_ever_ends_with_everything_that_was_started() -> None:
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(600)\n    os._exit(0)\n"
    )
    assert run(daemon + "while True: pass", time_s=1.0).stopped == "time"
    assert run(daemon + "os.close(1); os.close(2); time.sleep(600)", time_s=1.0).stopped == "time"
    assert run(daemon, time_s=30.0).stopped is None, "a process that was left behind does not hold the sandbox open"


def test_endless_output_is_cut() -> None:
    outcome = run("while True: print('x' * 1000)", output_kib=64)
    assert outcome.stopped == "output" and len(outcome.stdout) == 64 * 1024


def test_the_sandbox_ends_with_whoever_started_it() -> None:
    program = (
        "from workers.sandbox import *\n"
        "run_program(Program(files={'main.py': 'import time; time.sleep(97.531)'}, limits=SandboxLimits(time_s=90)))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    deadline = time.monotonic() + 60
    while len(inside := psutil.Process(parent.pid).children(recursive=True)) < 3:  # the sandbox, its first, the program
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs(inside, timeout=20)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_the_code_reward_by_cases() -> None:
    answer = {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}
    good = "Here it is:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone."
    assert code("", good, answer)["score"] == 1
    assert code("", "```python\ninput(); print(3)\n```", answer) == {"score": 0, "passed": 1, "stopped": 0}
    assert code("", "```python\ninput(); print(3)\n```", answer, partial=True)["score"] == 0.5
    assert code("", "```python\nwhile True: pass\n```", answer, time_s=0.5)["stopped"] == 1
    assert code("", "not code at all", answer)["score"] == 0


def test_the_code_reward_by_asserts() -> None:
    tests = ["assert double(2) == 4", "assert double('a') == 'aa'"]
    assert code("", "```py\ndef double(x):\n    return 2 * x\n```", tests)["score"] == 1
    assert code("", "```\ndef double(x):\n    return x + 2\n```", tests)["score"] == 0
    for cheat in ("import os; os._exit(0)", "raise SystemExit(0)", "print('x' * 32)\nimport sys; sys.exit()"):
        assert code("", cheat, "assert double(2) == 4")["score"] == 0


def test_forms_of_answers_and_responses() -> None:
    assert [case.stdin for case in cases_of('[{"input": ["1", "2"], "output": 3}]')] == ["1\n2"]
    assert cases_of({"tests": "assert True"})[0].tests == "assert True"
    for wrong in (None, {}, [], "", {"inputs": ["1"]}, [{"in": 1}], 5):
        with pytest.raises(ValueError, match="answer|case"):
            cases_of(wrong)
    assert extract_code("```\na\n```\n```python\nb\n```\n```json\nc\n```") == "b\n"
    assert extract_code("```python\nunfinished") == "unfinished"


def test_in_a_run_harm_costs_its_sample_alone() -> None:
    good = "def f(): return 1"
    with RewardFunctions([RewardFunctionConfig(path="code", options={"time_s": 1.0})], num_processes=2) as rewards:
        scores = rewards.score([
            RewardSample(prompt="", response=text, answer='"assert f() == 1"')
            for text in (good, "import os; os.kill(os.getppid(), 9)", "while True: pass", good)
        ])  # fmt: skip
    assert scores.total.tolist() == [1, 0, 0, 1] and scores.errors == 0
    assert scores.details["code/stopped"].tolist() == [0, 0, 1, 0]
