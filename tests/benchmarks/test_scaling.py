"""How throughput grows, and which runs cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import iteration
from benchmarks.iteration_options import parse
from benchmarks.reshard import versions
from benchmarks.scaling import base_of, scaling
from configs.errors import UserError

RESULT = {
    "iteration_s": 1.0, "tokens_per_s": 170.0, "stages_s": {}, "stages_idle": {}, "between_stages_s": 1.0, "idle": [],
    "sampling_s": None, "transition_s": None, "mfu": None, "peak_gib": {}, "rollout_gap_mean": None,
}  # fmt: skip
SIZES = ["--shape", "7b", "--micro-batch-tokens", "9216", "--set", "actor.fsdp.compile=true"]


def written(folder: Path, *arguments: str, tokens_per_s: float = 100.0, **changes: object) -> str:
    """The file that a run with these options leaves."""
    path = folder / "base.json"
    options = parse([*SIZES, *arguments])
    software, card = versions(options.engine), "a card" if options.gpus else None
    document = {"tokens_per_s": tokens_per_s, "software": software, "card": card, "options": vars(options)}
    path.write_text(json.dumps(document | changes))
    return str(path)


@pytest.mark.parametrize(
    ("prompts", "kind", "sentence"),
    [
        ("64", "strong", "strong scaling from 4 to 8: 1.70 times the tokens/s, 85.0% of ideal"),
        ("128", "weak", "weak scaling from 4 to 8: 1.70 times the tokens/s, 85.0% of ideal"),
    ],
)
def test_growth_is_the_ratio_of_throughputs_over_that_of_gpus(
    prompts: str, kind: str, sentence: str, tmp_path: Path
) -> None:
    options = parse([*SIZES, "--gpus", "8", "--prompts", prompts])
    base = base_of(written(tmp_path, "--gpus", "4", "--prompts", "64"), options, software=versions("sglang"))
    grown = scaling(base, {"tokens_per_s": 170.0, "card": "a card"}, options)
    assert grown is not None and (grown.kind, str(grown)) == (kind, sentence)


@pytest.mark.parametrize("card", ["a card", "another"])
def test_the_sentence_is_printed_and_kept_where_both_ran_on_one_card(
    card: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurement is the only part that is left out: it needs GPUs."""
    monkeypatch.setattr(iteration, "check_machine", lambda options: None)
    monkeypatch.setattr(iteration, "measured", lambda *_: RESULT | {"card": card})
    against, output = written(tmp_path, "--gpus", "4"), tmp_path / "eight.json"
    iteration.main([*SIZES, "--gpus", "8", "--against", against, "--output", str(output)])
    sentence = "strong scaling from 4 to 8: 1.70 times the tokens/s, 85.0% of ideal"
    told, kept = capsys.readouterr(), json.loads(output.read_text())
    if card == "another":
        assert "was made on a card: not compared" in told.err and "scaling" not in told.out + str(kept.keys())
    else:
        assert sentence in told.out and kept["scaling"]["sentence"] == sentence and told.err == ""


@pytest.mark.parametrize(
    ("theirs", "complaint"),
    [
        (["--gpus", "4", "--prompts", "48"], "had --prompts 48; the same for strong scaling, or --prompts 96 for weak"),
        (["--gpus", "4", "--samples", "4"], "was made with --samples 4, this run has 8"),
        (["--gpus", "4", "--set", "seed=1"], "was made with --set"),
        (["--gpus", "4", "--warm-up", "0"], "was made with --warm-up 0, this run has 1"),
        (["--gpus", "4", "--layers", "1"], "was made with --layers 1, this run has 2"),
        (["--gpus", "8"], "ranks were 8, this run has 8; name a run on fewer"),
        (["--ranks", "4"], "one of the two runs is on GPUs"),
    ],
)
def test_runs_of_other_work_are_not_compared(
    theirs: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(iteration, "check_machine", lambda options: None)  # as on a machine with GPUs
    against = written(tmp_path, *theirs)
    with pytest.raises(SystemExit) as end:
        iteration.main([*SIZES, "--gpus", "8", "--against", against])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--against {against}" in line and complaint in line


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"software": "torch 1.0"}, "ran with torch 1.0, this run has torch"),
        ({"tokens_per_s": 0}, "has 0.0 tokens/s of 4 ranks and 32 prompts, which no run has"),
        ({"tokens_per_s": float("nan")}, "has nan tokens/s"),
        ({"tokens_per_s": 10**400}, "is not what --output"),
    ],
)
def test_a_run_of_other_software_or_without_a_throughput_is_refused(
    changes: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    against = written(tmp_path, "--gpus", "4", **changes)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=complaint):
        base_of(against, parse([*SIZES, "--gpus", "8"]), software=versions("sglang"))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "No such file"),
        ("{}", "is not what --output"),
        ("[1", "is not what --output"),
        ("[]", "is not what"),
        ("[" * 100_000, "is not"),
    ],
)
def test_a_file_that_no_run_wrote_is_one_line(
    content: str | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "base.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as end:
        iteration.main(["--engine", "torch", "--against", str(path)])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--against {path}" in line and complaint in line
