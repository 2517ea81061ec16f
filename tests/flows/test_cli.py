"""The command line: one line for a mistake, one document with --json, late imports, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from configs.loader import resolved
from configs.reference import json_schema
from configs.schema import RunConfig
from flows.cli import app, main
from flows.commands.tables import counted, number, size
from flows.prefect_server import HOME
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from tests.configs.trees import write_good
from tests.flows.stored_run import stored_run

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]


def hybridflow(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a user starts it."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "flows.cli", *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def document_of(capsys: Capture, *args: str, code: int = 0) -> Any:
    """The one JSON document that a command prints."""
    assert main([*args, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def commands() -> list[list[str]]:
    """Every command, as the words that call it."""
    top = typer.main.get_command(app)
    found = []
    for name, command in top.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found += [[name, sub] for sub in inner] if inner else [[name]]
    return found


def test_the_commands_are_those_of_the_manual() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert commands()
    for words in commands():
        assert f"## `hybridflow {' '.join(words)}" in text


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_has_help_and_json(words: list[str]) -> None:
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_help_names_the_exit_codes_and_loads_nothing_heavy() -> None:
    program = (
        "import sys, time\nfrom flows.cli import main\nmain(['--help'])\n"
        "print(time.process_time())\n"  # of the processor: other processes do not count
        "print(sorted({'torch', 'prefect', 'distributed', 'transformers', 'zarr', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    *_, seconds, heavy = done.stdout.splitlines()
    assert heavy == "[]" and float(seconds) < 0.5
    for code in ("0 ok", "1 the run failed", "2 a mistake", "130 stopped"):
        assert code in " ".join(done.stdout.split())


def test_version_is_that_of_the_distribution(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "hybridflow 0.1.0\n"


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["rn"], "No such command 'rn'"),
        (["run"], "Missing argument"),
        (["run", "x", "--frobnicate"], "--frobnicate"),
        (["run", "no_such_config"], "no_such_config: there is no such file"),
        (["resume", "no_such_run"], "no run 'no_such_run'"),
        (["rollouts", "ls", "no_such_run"], "no run 'no_such_run'"),
        (["rollouts", "show", "no_such_run"], "no run 'no_such_run'"),
        (["checkpoints", "ls", "/dev/null"], "/dev/null"),
        (["ui", "--runs", "/no/such/folder"], "/no/such/folder"),
        (["quickstart", "--output", "/dev/null"], "/dev/null"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys: Capture, args: list[str], part: str) -> None:
    assert main(args) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1 and part in printed.err
    assert main([*args, "--json"]) == 2
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["exit_code"] == 2 and part in document["error"]
    assert len(printed.err.splitlines()) == 1


def test_config_check_says_ok_or_what_is_wrong(tmp_path: Path, capsys: Capture) -> None:
    path = str(write_good(tmp_path))
    args = ["config", "check", path, "--set", "data.batch_size=1"]
    (warning,) = (checked := document_of(capsys, *args))["warnings"]
    assert (checked["config"], checked["ok"]) == (path, True)
    assert warning.startswith(f"{path}: actor.path: organisation/model is no directory here")
    assert main(args) == 0
    assert capsys.readouterr().out.splitlines() == [f"warning: {warning}", f"{path}: ok"]
    wrong = document_of(capsys, "config", "check", path, "--set", "rollout.num_samples=1", code=2)
    assert "rollout.num_samples: 1" in wrong["error"]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("rewards.functions=[{path: 'own.py:two'}]", ("rewards.functions.0.path: 'own.py:two'", "as two(prompt, resp")),
        ("rewards.functions=[{path: 'own.py:scaled'}]", ("--set rewards", "missing a required argument: 'scale'")),
        ("algorithm=own.py:rloo", ("--set algorithm=own.py:rloo: algorithm", "own.py:7: kl.placement: reward", "none")),
        ("algorithm=evaluate", ("algorithm: evaluate trains nothing", "hybridflow evaluate", "ppo, remax")),
    ],
)
def test_config_check_and_a_dry_run_refuse_what_a_run_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, override: str, parts: tuple[str, ...]
) -> None:
    good = str(write_good(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    for command in (["config", "check", good], ["run", good, "--dry-run"]):
        assert main([*command, "--set", override]) == 2
        line = capsys.readouterr().err
        assert all(part in line for part in parts) and line.startswith("hybridflow: --set ")
    listed = document_of(capsys, "config", "check", good, "--set", "algorithm=zzz", code=2)["error"]
    assert "valid: " in listed and "evaluate" not in listed


OWN = """def two(prompt, response): return 0.0
def scaled(prompt, response, answer, scale): return scale
async def rloo(models, prompts):
    rollouts = await models.actor.generate_sequences(prompts)
    await models.actor.compute_log_prob(rollouts)
    await models.reward.compute_reward(rollouts)
    await models.compute_advantages(rollouts, estimator="rloo")
    await models.actor.update_actor(rollouts, loss="reinforce")
def reads(prompt, response, answer: str): return float(answer in response)
"""


def test_an_answer_that_is_no_text_where_the_function_says_text_is_a_mistake(tmp_path: Path, capsys: Capture) -> None:
    good, own = write_good(tmp_path), tmp_path / "own.py"
    own.write_text(OWN)
    args = ["config", "check", str(good), "--set", f"rewards.functions=[{{path: '{own}:reads'}}]"]
    assert document_of(capsys, *args)["ok"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f'{rows.read_text()}{{"prompt": "a", "answer": 1}}\n')
    line = document_of(capsys, *args, code=2)["error"]
    assert "own.py:reads says that its answer is a text (str), but " in line
    assert "line 2: column 'answer' (data.answer_column) is 1; write texts there, or annotate" in line


def test_a_mistake_that_takes_the_users_code_to_see_names_the_line_of_the_file(tmp_path: Path, capsys: Capture) -> None:
    good, own = write_good(tmp_path), tmp_path / "own.py"
    own.write_text(OWN)
    good.write_text(good.read_text().replace("path: exact_match", f"path: {own}:two"))
    number = next(n for n, line in enumerate(good.read_text().splitlines(), 1) if "own.py" in line)
    line = document_of(capsys, "config", "check", str(good), code=2)["error"]
    assert line.startswith(f"{good}:{number}: rewards.functions.0.path: ")


def test_more_prompts_an_iteration_than_rows_are_warned_of(tmp_path: Path, capsys: Capture) -> None:
    path = str(write_good(tmp_path))
    document = document_of(capsys, "config", "check", path, "--set", "data.batch_size=2")
    assert any("data.batch_size: 2, but data.train has 1 rows" in line for line in document["warnings"])


def test_a_budget_that_a_sequence_may_exceed_is_warned_of(tmp_path: Path, capsys: Capture) -> None:
    path = str(write_good(tmp_path))
    args = ["config", "check", path, "--set", "data.max_prompt_tokens=20", "--set", "rollout.max_new_tokens=10"]
    said = {
        budget: [
            line
            for line in document_of(capsys, *args, "--set", f"training.max_tokens_per_micro_batch={budget}")["warnings"]
            if "max_tokens_per_micro_batch: 29, but a sequence may have 30 tokens" in line
        ]
        for budget in (29, 30)
    }
    assert len(said[29]) == 1 and not said[30]


def test_all_of_several_mistakes_are_printed_a_line_each(tmp_path: Path, capsys: Capture) -> None:
    overrides = [word for number in range(13) for word in ("--set", f"kl.key{number}=1")]
    args = ["config", "check", str(write_good(tmp_path)), *overrides]
    assert len(document_of(capsys, *args, code=2)["problems"]) == 13
    assert main(args) == 2
    *lines, last = capsys.readouterr().err.splitlines()
    assert [f"kl.key{number}:" in line for number, line in enumerate(lines)] == [True] * 10
    assert last == "hybridflow: 3 more of them; --json prints all"


def test_config_show_prints_every_value_and_what_it_prints_is_a_configuration(tmp_path: Path, capsys: Capture) -> None:
    path = str(write_good(tmp_path))
    assert main(["config", "show", path, "--set", "actor.optimizer.lr=1e-5"]) == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capsys.readouterr().out, encoding="utf-8")
    tree = document_of(capsys, "config", "show", str(shown))
    assert RunConfig.model_validate(tree).actor.optimizer.lr == 1e-5
    assert tree == resolved(RunConfig.model_validate(tree))


def test_config_schema_is_the_schema(capsys: Capture) -> None:
    assert document_of(capsys, "config", "schema") == json_schema()


def test_a_dry_run_says_what_would_run_and_makes_nothing(tmp_path: Path, capsys: Capture) -> None:
    path, runs = str(write_good(tmp_path)), tmp_path / "elsewhere"
    document = document_of(capsys, "run", path, "--dry-run", "--output", str(runs))
    assert document["config"]["output"] == str(runs)
    assert document["pools"] == {"main": {"ranks": 1, "roles": ["actor", "reference", "reward"]}}
    assert document["calls"][0]["stage"] == "actor.generate_sequences"
    assert main(["run", path, "--dry-run", "--output", str(runs)]) == 0
    assert "nothing was started" in capsys.readouterr().out
    assert not runs.exists()


def test_rollouts_ls_lists_committed_stages(tmp_path: Path, capsys: Capture) -> None:
    run = stored_run(tmp_path)
    document = document_of(capsys, "rollouts", "ls", str(run.path))
    first = document["iterations"][0]
    assert (first["iteration"], first["rows"], first["tokens"], first["mean_reward"]) == (0, 4, 19, 0.5)
    assert first["stages"] == ["actor.generate_sequences", "reward.compute_reward", "actor.update_actor"]
    assert document["iterations"][1]["mean_reward"] is None  # a reward that is no number
    store = RolloutStore(run.rollouts)
    for place in range(9):
        store.log_state_stage(1, f"a_model_of_our_own.update_{place}", arguments={}, metrics={})
    assert main(["rollouts", "ls", str(run.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line.split()[-1] for line in lines if line.lstrip()[:2] in ("0 ", "1 ")] == ["3", "12"], "1 to 3, 1 to 12"
    store.log_state_stage(0, "actor.evaluate", arguments={}, metrics={})
    assert main(["rollouts", "ls", str(run.path)]) == 0
    out = capsys.readouterr().out
    assert {"1 to 3 + evaluation", "1 to 12"} <= {line.strip().rpartition("  ")[2] for line in out.splitlines()}
    assert "in some iterations only: actor.evaluate" in out
    assert "actor.generate_sequences" in (text := " ".join(lines)) and "12 a_model_of_our_own.update_8" in text


def test_show_takes_the_last_iteration_unless_told(tmp_path: Path, capsys: Capture) -> None:
    path = str(stored_run(tmp_path, iterations=3).path)
    asked: list[list[str]] = [[], ["-i", "-1"], ["-i", "-3"]]
    assert [document_of(capsys, "rollouts", "show", path, *more)["iteration"] for more in asked] == [2, 2, 0]
    assert "--iteration -4: not stored" in document_of(capsys, "rollouts", "show", path, "-i", "-4", code=2)["error"]


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["table", "json"])
def test_a_reader_that_has_read_enough_is_no_failure(tmp_path: Path, more: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "rollouts", "show", str(stored_run(tmp_path).path), *more],
        cwd=ROOT,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        (">&- <&-", 0, ""),
        ("--json >/dev/full", 1, "hybridflow: the result cannot be written to stdout: No space left on device\n"),
    ],
)
def test_a_stdout_that_takes_nothing_costs_no_traceback(tmp_path: Path, shell: str, code: int, said: str) -> None:
    command = f"{sys.executable} -m flows.cli rollouts ls {stored_run(tmp_path, iterations=1).path} {shell}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_working_directory_that_is_gone_is_said(tmp_path: Path) -> None:
    command = (
        f"mkdir {tmp_path}/a; cd {tmp_path}/a; rmdir ../a; PYTHONPATH={ROOT} {sys.executable} -m flows.cli status a"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "the working directory is gone" in done.stderr.splitlines()[-1]


def test_columns_is_heeded_in_a_pipe(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(stored_run(tmp_path).path)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["rollouts", "show", path]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_counts_and_sizes_read_well() -> None:
    assert [counted(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [size(count) for count in (1, 999, 12_340, 4_000_000)] == ["1 byte", "999 bytes", "12.3 kB", "4.0 MB"]
    assert [number(value) for value in (None, 3, 0.51239, 12345.6, 1e12)] == ["", "3", "0.5124", "12346", "1e+12"]


@pytest.mark.parametrize("name", ["good", "latest", "folder"])
def test_a_run_is_found_by_its_name(tmp_path: Path, capsys: Capture, name: str) -> None:
    stored_run(tmp_path, iterations=1)
    run = stored_run(tmp_path, iterations=1)
    name = run.path.name if name == "folder" else name
    assert document_of(capsys, "rollouts", "ls", name, "--runs", str(tmp_path / "runs"))["run"] == str(run.path)


def test_rollouts_show_prints_every_sample_of_a_prompt(tmp_path: Path, capsys: Capture) -> None:
    run = stored_run(tmp_path)
    args = ("rollouts", "show", str(run.path), "--iteration", "0")
    (prompt,) = document_of(capsys, *args, "--prompt", "0")["prompts"]
    assert (prompt["prompt_id"], prompt["prompt_text"], prompt["prompt_tokens"]) == (7, "1+1=", [0, 1, 2])
    first, second = prompt["samples"]
    assert (first["text"], first["token_ids"], first["reward"]) == ("two", [3, 4], 1.0)
    assert first["rollout_log_probs"] == [-3 / 8, -4 / 8]
    assert len(first["advantages"]) == 2
    assert second["token_ids"] == [8, 9, 10, 11]  # tokens 5 to 7 are the second row's prompt
    other = document_of(capsys, *args)["prompts"][1]
    assert [sample["token_ids"] for sample in other["samples"]] == [[], [16, 17, 18]]


def test_rollouts_show_agrees_with_plain_zarr(tmp_path: Path, capsys: Capture) -> None:
    import zarr

    run = stored_run(tmp_path)
    document = document_of(capsys, "rollouts", "show", str(run.path), "--iteration", "1")
    group = zarr.open_group(str(run.rollouts / "00000001"), mode="r")
    offsets, ids, advantages = (group[name][:] for name in ("offsets", "token_ids", "advantages"))
    samples = [sample for prompt in document["prompts"] for sample in prompt["samples"]]
    for row, sample in enumerate(samples):
        start, end = offsets[row] + group["prompt_length"][row], offsets[row + 1]
        assert sample["token_ids"] == ids[start:end].tolist()
        assert sample["advantages"] == advantages[start:end].tolist()


@pytest.mark.parametrize("extra", [[], ["--prompt", "1"], ["--prompt", "0", "--tokens"]])
def test_rollouts_show_prints_texts_as_they_are_but_no_control_characters(
    tmp_path: Path, capsys: Capture, extra: list[str]
) -> None:
    run = stored_run(tmp_path)
    assert main(["rollouts", "show", str(run.path), "--iteration", "0", *extra]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert ("[bold]2+2=" in shown) == ("--tokens" not in extra)
    assert ("\\x1b[31mred" in shown) == (extra != ["--prompt", "1"])
    assert ("rollout_log_probs" in shown) == bool(extra)


@pytest.mark.parametrize(
    ("extra", "part"), [(["-i", "5"], "there are 0 to 1"), (["-i", "0", "-p", "2"], "prompts 0 to 1")]
)
def test_what_is_not_stored_is_said(tmp_path: Path, capsys: Capture, extra: list[str], part: str) -> None:
    run = stored_run(tmp_path)
    assert main(["rollouts", "show", str(run.path), *extra]) == 2
    assert part in capsys.readouterr().err


def test_a_run_that_failed_early_does_not_hide_the_one_before(tmp_path: Path, capsys: Capture) -> None:
    run = stored_run(tmp_path)
    failed = RunDirectory.create(run.config(), tmp_path / "runs", suffix="failed")
    for words in ("rollouts ls", "checkpoints ls", "rollouts stats"):
        for name in (run.name, "latest"):
            assert main([*words.split(), name, "--runs", str(tmp_path / "runs")]) == 0
            printed = capsys.readouterr()
            assert f"{failed.path.name} has no committed " in printed.err and run.path.name in printed.err
            assert "yet" not in printed.out
    assert document_of(capsys, "status", "latest", "--runs", str(tmp_path / "runs"))["run"] == str(failed.path)


def test_checkpoints_ls_lists_committed_ones(tmp_path: Path, capsys: Capture) -> None:
    run = stored_run(tmp_path)
    (found,) = document_of(capsys, "checkpoints", "ls", str(run.path))["checkpoints"]
    assert (found["step"], found["bytes"], found["state"]) == (2, 10, {"iteration": 2})
    assert main(["checkpoints", "ls", str(run.path)]) == 0
    assert "00000002" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "part"),
    [(["--step", "3"], "there are 2"), (["--role", "actr"], "did you mean actor?"), (["FULL"], "not an empty folder")],
)
def test_an_export_that_cannot_be_is_refused(tmp_path: Path, capsys: Capture, extra: list[str], part: str) -> None:
    run = stored_run(tmp_path)
    destination = tmp_path if extra == ["FULL"] else tmp_path / "export"
    extra = [] if extra == ["FULL"] else extra
    assert main(["checkpoints", "export", str(run.path), str(destination), *extra]) == 2
    assert part in capsys.readouterr().err


def test_doctor_says_that_cpu_runs_work_here() -> None:
    done = hybridflow("doctor", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["cpu_run"] == {"works": True, "missing": []}
    assert document["torch"]["backends"]
    assert document["gpu_run"]["works"] == (document["gpu_run"]["missing"] == [])
    assert document["sglang"]["usable"] or document["sglang"]["reason"]


def test_with_json_other_output_of_the_process_and_its_children_goes_to_stderr() -> None:
    program = (
        "import os, subprocess, sys\n"
        "from flows.commands.answer import Answer, deliver\n"
        "def work():\n"
        "    print('printed')\n"
        "    os.write(1, b'written\\n')\n"
        "    subprocess.run([sys.executable, '-c', 'print(\"of a child\")'], check=True)\n"
        "    return Answer(document={'a': 1}, show=print)\n"
        "deliver(work, as_json=True)\n"
        "print('after')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"a": 1}
    for text in ("printed", "written", "of a child", "after"):
        assert text in done.stderr


def test_an_error_that_is_no_users_mistake_keeps_its_traceback_and_gives_a_document() -> None:
    program = (
        "from flows.commands.answer import deliver\n"
        "def work():\n"
        "    raise RuntimeError('rank 1 died')\n"
        "deliver(work, as_json=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"error": "RuntimeError: rank 1 died", "exit_code": 1}
    assert "Traceback" in done.stderr


def test_ui_says_its_url_serves_it_and_ends_with_a_signal(prefect_home: Path, tmp_path: Path) -> None:
    import urllib.request

    (tmp_path / "runs").mkdir()
    prefect_home.rename(tmp_path / "runs" / HOME)
    command = [sys.executable, "-P", "-m", "flows.cli", "ui", "--runs", str(tmp_path / "runs")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = next((word for word in line.split() if word.startswith("http")), None)
        if url is None:
            process.kill()  # leaving the context waits for it
            pytest.fail(f"no address in {line!r}")
        with urllib.request.urlopen(f"{url}/api/health", timeout=10) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
