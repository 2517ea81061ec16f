"""rollouts grep, stats, diff, export and the coloured views, on a stored run."""

from __future__ import annotations

import json
import shutil
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from rich.console import Console

from flows.cli import main
from flows.commands.token_view import coloured, scale_of, style_of
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from storage.token_text import TokenTexts
from tests.flows.stored_run import stored_run
from tests.flows.test_cli import Capture, document_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return stored_run(tmp_path_factory.mktemp("stored"), iterations=3)


def test_grep_finds_text_and_filters_by_any_column(run: RunDirectory, capsys: Capture) -> None:
    document = document_of(capsys, "rollouts", "grep", str(run.path), "o", "--where", "reward = 1")
    assert [(s["iteration"], s["row"], s["text"]) for s in document["samples"]] == [
        (iteration, row, text) for iteration in (0, 1, 2) for row, text in ((0, "two"), (3, "four"))
    ]
    assert document["samples"][0]["span"] == [2, 3] and document["samples"][0]["prompt_id"] == 7
    one = document_of(capsys, "rollouts", "grep", str(run.path), "RED", "-I", "--iterations", "-1", "--limit", "1")
    assert (one["matches"], one["samples"][0]["iteration"]) == (1, 2)
    counted = document_of(capsys, "rollouts", "grep", str(run.path), "", "--count", "--in", "prompt_text")
    assert (counted["matches"], counted["samples"]) == (12, [])


def test_grep_prints_no_control_characters_of_a_model(run: RunDirectory, capsys: Capture) -> None:
    assert main(["rollouts", "grep", str(run.path), "red", "--limit", "1"]) == 0
    printed = capsys.readouterr().out
    assert "\\x1b[31mred" in printed and "\x1b" not in printed
    assert "3 samples match, 1 shown" in printed


def test_stats_agree_with_the_columns(run: RunDirectory, capsys: Capture) -> None:
    document = document_of(capsys, "rollouts", "stats", str(run.path), "--by", "iteration")
    store = RolloutStore(run.rollouts)
    for group in document["groups"]:
        reward = store.read(group["value"], columns=["reward"])["reward"]
        finite = reward[np.isfinite(reward)]
        found = group["columns"]["reward"]
        assert (group["rows"], found["count"], found["not_finite"]) == (4, len(finite), 4 - len(finite))
        assert found["mean"] == pytest.approx(finite.mean()) and found["max"] == finite.max()
        assert group["columns"]["length"]["mean"] == 2.25
    texts = document_of(capsys, "rollouts", "stats", str(run.path), "-c", "text", "--where", "length > 0")
    assert texts["groups"][0]["columns"]["text"] == {"distinct": 3, "most": {"\x1b[31mred": 3, "four": 3, "two": 3}}
    assert main(["rollouts", "stats", str(run.path)]) == 0
    assert "reward/exact_match" in capsys.readouterr().out


def test_diff_compares_the_same_prompts(run: RunDirectory, capsys: Capture) -> None:
    document = document_of(capsys, "rollouts", "diff", str(run.path), "--second", "1")
    by_prompt = {prompt["prompt_id"]: prompt for prompt in document["prompts"]}
    assert set(by_prompt) == {7, 9} and document["only_first"] == document["only_second"] == 0
    assert by_prompt[7]["change"] == {"reward": 0.0, "length": 0.0}
    assert by_prompt[9]["second"]["mean"]["reward"] is None  # a reward of iteration 1 is no number
    one = document_of(capsys, "rollouts", "diff", str(run.path), "--first", "0", "--second", "-1", "--prompt-id", "7")
    assert [row["text"] for row in one["prompts"][0]["second"]["rows"]] == ["two", "\x1b[31mred"]
    assert main(["rollouts", "diff", str(run.path), "--prompt-id", "9"]) == 0
    printed = capsys.readouterr().out
    assert "[bold]2+2=" in printed and "iteration 2" in printed
    assert main(["rollouts", "diff", str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert "iteration 0 -> iteration 2, all samples: mean reward 0.5 -> 0.5, mean length 2.25 -> 2.25" in printed
    assert "2 prompts in both" in printed and "chosen since they share the most prompts" in printed
    apart = document_of(capsys, "rollouts", "diff", str(run.path), "--first", "2")
    assert (apart["first"], apart["second"], len(apart["prompts"])) == (2, 2, 2), "no later one: with itself"


def test_a_diff_of_two_runs_says_which_is_which(
    run: RunDirectory, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    other = shutil.copytree(run.path, tmp_path / "second")
    names = f"iteration 2 of {run.path.name}", "iteration 2 of second"
    assert main(["rollouts", "diff", str(run.path), "--other", str(other)]) == 0
    heading, *_, counts = capsys.readouterr().out.strip().splitlines()
    assert heading.startswith(" -> ".join(names)) and counts.endswith(f"0 only in {names[0]}, 0 only in {names[1]}")
    assert main(["rollouts", "diff", str(run.path), "--other", str(other), "--prompt-id", "7"]) == 0
    assert all(name in capsys.readouterr().out.splitlines()[2] for name in names[1:])
    document = document_of(capsys, "rollouts", "diff", str(run.path), "--other", str(other))
    assert (document["first_run"], document["second_run"]) == (str(run.path), str(other))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "iterations: --first and --second can name any other"),
        (["--first", "0"], "iterations: --second can name any other"),
        (["--first", "0", "--second", "1"], "--other RUN compares with another run"),
    ],
)
def test_a_diff_without_common_prompts_names_the_options_that_are_still_open(
    given: list[str], says: str, tmp_path: Path, capsys: Capture
) -> None:
    apart = stored_run(tmp_path, new_prompts=True)
    assert main(["rollouts", "diff", str(apart.path), *given]) == 0
    assert " ".join(capsys.readouterr().out.split()).endswith(says)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_datasets_opens_what_is_exported(run: RunDirectory, tmp_path: Path, suffix: str, capsys: Capture) -> None:
    import datasets

    path = tmp_path / f"samples.{suffix}"
    document = document_of(capsys, "rollouts", "export", str(run.path), str(path))
    assert document["rows"] == 12 and [p.name for p in tmp_path.iterdir()] == [path.name]
    kind = "json" if suffix == "jsonl" else suffix
    loaded = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    store, place = RolloutStore(run.rollouts), 0
    for iteration in range(3):
        batch = store.read(iteration)
        for row in range(batch.num_rows):
            found = loaded[place]
            assert (found["iteration"], found["row"], found["text"]) == (iteration, row, batch["text"][row])
            tokens = slice(batch.offsets[row], batch.offsets[row + 1])
            assert found["token_ids"] == batch["token_ids"][tokens].tolist()
            for name in ("rollout_log_probs", "advantages"):
                np.testing.assert_array_equal(np.array(found[name], np.float32), batch[name][tokens])
            reward = np.nan if found["reward"] is None else np.float32(found["reward"])
            np.testing.assert_array_equal(reward, batch["reward"][row])
            place += 1


def test_an_export_takes_columns_rows_and_iterations(run: RunDirectory, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "new folder" / "some.jsonl"
    args = ("-c", "text", "-c", "length", "--where", "min(advantages) < -0.3", "--iterations", "1:")
    document = document_of(capsys, "rollouts", "export", str(run.path), str(path), *args)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert document["columns"] == ["iteration", "row", "text", "length"] and document["rows"] == len(lines)
    assert {line["iteration"] for line in lines} == {1, 2} and all(
        set(line) == set(document["columns"]) for line in lines
    )


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["grep", "RUN", "("], "PATTERN: '(' is no regular expression"),
        (["grep", "RUN", "a", "--in", "token_ids"], "--in token_ids: not a text column; valid: group, prompt_id"),
        (["grep", "RUN", "a", "--in", "reward"], "--in reward: holds numbers"),
        (["grep", "RUN", "a", "--where", "rewrd < 0"], "no column 'rewrd'; did you mean reward?"),
        (["stats", "RUN", "-c", "lenght"], "no column 'lenght'; did you mean length?"),
        (["grep", "RUN", "a", "--iterations", "7"], "--iterations 7: none is stored; there are 0 to 2"),
        (["grep", "RUN", "a", "--iterations", "a"], "--iterations 'a': a number or FIRST:END"),
        (["stats", "RUN", "-c", "advantages"], "'advantages' has a value for each token"),
        (["stats", "RUN", "--by", "nothing"], "no column 'nothing'"),
        (["diff", "RUN", "--second", "9"], "--second 9: none is stored"),
        (["diff", "RUN", "--prompt-id", "8"], "--prompt-id 8: no two iterations of"),
        (["diff", "RUN", "--first=0", "--second=1", "--prompt-id=8"], "not in both iterations; shared are 7, 9"),
        (["export", "RUN", "a.csv"], "a.csv: the name must end in .parquet or .jsonl"),
        (["export", "RUN", "a.jsonl", "-c", "nothing"], "no column 'nothing'"),
        (["export", "RUN", "/proc/nowhere/a.jsonl"], "cannot write"),
        (["export", "RUN", "RUN/metrics.jsonl"], "metrics.jsonl: lies in the run directory"),
        (["show", "RUN", "-i", "0", "--color", "reward"], "'reward' has one value for a sample"),
        (["show", "RUN", "-i", "0", "--where", "reward <"], "found the end"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(run: RunDirectory, capsys: Capture, args: list[str], part: str) -> None:
    assert main(["rollouts", *(arg.replace("RUN", str(run.path)) for arg in args)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1 and part in printed.err


def test_show_takes_a_filter_colours_and_columns(run: RunDirectory, capsys: Capture) -> None:
    args = ("rollouts", "show", str(run.path), "-i", "0")
    document = document_of(capsys, *args, "--where", "reward = 1 and length = 3")
    assert [sample["text"] for prompt in document["prompts"] for sample in prompt["samples"]] == ["four"]
    assert main([*args, "--color", "advantages", "--side-by-side", "--prompt", "0"]) == 0
    printed = capsys.readouterr().out
    assert "⟨8⟩⟨9⟩⟨10⟩⟨11⟩" in printed and "\x1b" not in printed  # ids: this run has no tokenizer
    assert "sample 0" in printed.split("\n⟨")[0] and "sample 1" in printed


def test_tokens_are_shown_with_their_texts(run: RunDirectory, capsys: Capture) -> None:
    tokens = {f"{'w' * (number % 3)}\n {number}": number for number in range(30)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(tokens, unk_token="w\n 1"))
    kept = Path(str(run.path)) / "tokenizer.json"
    tokenizer.save(str(kept))
    try:
        assert main(["rollouts", "show", str(run.path), "-i", "0", "-p", "0", "--tokens"]) == 0
    finally:
        kept.unlink()
    lines = capsys.readouterr().out.splitlines()
    header = next(line.split() for line in lines if "token_ids" in line)
    assert header[:3] == ["token", "text", "token_ids"]
    rows = [line.split("  ") for line in lines if "'" in line]
    texts = {number: text for text, number in tokens.items()}
    assert [[cell.strip() for cell in row if cell.strip()][:3] for row in rows] == [
        [str(t), repr(f"{' ' * (t > 0)}{texts[number]}"), str(number)]
        for row in ((3, 4), (8, 9, 10, 11))
        for t, number in enumerate(row)
    ]


def test_colours_follow_the_sign_and_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = coloured(["a", "b", "c", "d"], [1.0, -1.0, 0.0, float("nan")], scale=1.0)
    assert [str(text.get_style_at_offset(Console(), i).bgcolor is not None) for i in range(4)] == [
        "True", "True", "False", "False",
    ]  # fmt: skip
    assert style_of(1, scale=1) != style_of(-1, scale=1) != style_of(-0.1, scale=1)
    assert scale_of([]) == scale_of([0.0]) == 0 and scale_of([-3.0]) == 3
    shown = {}
    for name, terminal in (("terminal", True), ("file", False)):
        out = StringIO()
        Console(file=out, force_terminal=terminal, color_system="truecolor" if terminal else None).print(text)
        shown[name] = out.getvalue()
    assert "\x1b[" in shown["terminal"] and shown["file"] == "abcd\n"
    monkeypatch.setenv("NO_COLOR", "1")
    out = StringIO()
    Console(file=out, force_terminal=True).print(text)
    assert "48;2" not in out.getvalue()


def test_pieces_of_tokens_are_the_decoded_text(tmp_path: Path) -> None:
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["the cat sat", "the hat"], vocab_size=300)
    tokenizer._tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = TokenTexts([tmp_path / "nothing here", tmp_path])
    for text in ("the cat sat", "snow ☃ and 漢字 the", "", " the"):
        ids = tokenizer.encode(text).ids
        pieces = texts.pieces(ids)
        assert texts.are_known and len(pieces) == len(ids) and "".join(pieces) == text
    assert len(texts.pieces([10**6, 5])) == 2  # an id beyond the vocabulary is no crash
