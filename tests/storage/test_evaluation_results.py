from __future__ import annotations

from storage.evaluation_results import evaluation_lines, evaluations_of, first_and_last

ESTIMATES = {
    "mean@4": 0.5,
    "mean@4_low": 0.25,
    "mean@4_high": 0.75,
    "pass@4": 1.0,
    "pass@4_low": 0.68,
    "pass@4_high": 1.0,
    "prompts": 8.0,
}


def logged(prefix: str, **more: float) -> dict[str, float]:
    return {f"{prefix}{name}": value for name, value in (ESTIMATES | more).items()}


def test_evaluations_are_found_with_their_steps_and_data_sets() -> None:
    lines = [
        {"iteration": 0, "eval/step": 1, **logged("eval_before/"), **logged("eval/"), **logged("eval/sums/")},
        {"iteration": 1, "loss": 1.0},
        {"iteration": 2, "eval/step": 3, **logged("eval/", **{"reward/short_mean": 0.125})},
        {"eval/mean@4": 1.0},
    ]
    found = evaluations_of(lines)
    assert [(entry.step, sorted(entry.datasets)) for entry in found] == [(0, [""]), (1, ["", "sums"]), (3, [""])]
    assert found[2].datasets[""]["reward/short_mean"] == 0.125
    documents = [entry.to_json() for entry in first_and_last(found[:2])]
    assert evaluation_lines(documents) == [
        "evaluation before training: mean@4 0.5 (0.25 to 0.75), pass@4 1 (0.68 to 1)",
        "evaluation after 1 iteration: mean@4 0.5 (0.25 to 0.75), pass@4 1 (0.68 to 1); "
        "sums: mean@4 0.5 (0.25 to 0.75), pass@4 1 (0.68 to 1)",
    ]


def test_what_a_pass_is_and_why_there_is_no_interval_is_said() -> None:
    graded = {"mean@1": 0.5, "pass@1": 0.0, "pass@1_low": 0.0, "pass@1_high": 0.32, "pass_score": 1, "prompts": 8.0}
    (entry,) = evaluations_of([{"iteration": 0, **{f"eval/{name}": value for name, value in graded.items()}}])
    assert entry.sentence() == (
        "evaluation before training: mean@1 0.5 (the same for all 8 prompts: no interval), "
        "pass@1 0 (0 to 0.32; a pass: score 1 or more)"
    )


def test_lines_without_a_step_are_those_of_an_earlier_version() -> None:
    lines = [{"iteration": 0, "eval/nll": 2.0, "eval/perplexity": 7.4}, {"iteration": 4, "eval/perplexity": None}]
    assert evaluation_lines(e.to_json() for e in evaluations_of(lines)) == [
        "evaluation before training: perplexity 7.4"
    ]
    assert [entry.step for entry in evaluations_of([{"iteration": 4, "eval/nll": 1}])] == [5]
    assert first_and_last([]) == []
