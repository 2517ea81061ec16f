"""The quickstart, whole: the numbers that the README states."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows import quickstart as module
from storage.run_directory import RunDirectory

STAGES = ("sft", "reward", "ppo")


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=120)
    (wheel,) = folder.glob("hybridflow-*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "site")]
    subprocess.run([*install, str(wheel)], check=True, timeout=120)
    return folder / "site"


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory that holds packages named as ours, which would break everything if imported."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name in ("configs", "pipeline", "storage", "workers", "flows"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('the working directory shadows a package')")
    return folder


@pytest.fixture(scope="module")
def document(installed: Path, parent: Path) -> dict[str, Any]:
    """The quickstart from the wheel, outside the repository, with a Prefect server of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, str(installed / "bin" / "hybridflow"), "quickstart", "--output", "runs", "--json"],
        cwd=parent,
        env={**inherited, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_wheel_is_what_ran(installed: Path) -> None:
    where = subprocess.run(
        [sys.executable, "-P", "-c", "import flows; print(flows.__file__)"],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(installed)


def test_the_reward_model_is_right_on_held_out_pairs(document: dict[str, Any]) -> None:
    assert document["pair_accuracy"] >= module.MIN_PAIR_ACCURACY >= 0.8


def test_the_rule_scores_held_out_replies_higher_after_ppo(document: dict[str, Any]) -> None:
    assert document["rule_after"] - document["rule_before"] >= module.MIN_RULE_GAIN


def test_the_policy_stays_near_the_reference(document: dict[str, Any]) -> None:
    assert 0 < document["kl"] <= module.MAX_KL
    assert document["within_bounds"]


def test_the_document_is_json_and_names_the_run_directories(document: dict[str, Any], parent: Path) -> None:
    assert json.loads(json.dumps(document)) == document
    assert document["status"] == "completed"
    for stage in STAGES:
        run = RunDirectory.open(document["runs"][stage])
        assert run.path.parent == (parent / "runs").resolve()
        assert run.config().resources.num_ranks == 2


def test_a_drawing_is_in_the_ppo_run(document: dict[str, Any]) -> None:
    png = Path(document["plot"])
    assert png.is_relative_to(document["runs"]["ppo"])
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_exported_policy_is_what_transformers_loads(document: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = RunDirectory.open(document["runs"]["ppo"]).exports / "actor"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    said = model.generation_config
    assert (said.eos_token_id, said.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    ids = tokenizer("customer : where is my order ? agent :", return_tensors="pt")["input_ids"]
    reply = tokenizer.decode(model.generate(ids, max_new_tokens=28, do_sample=False)[0, ids.shape[1] :])
    assert "." in reply and "<unk>" not in reply
