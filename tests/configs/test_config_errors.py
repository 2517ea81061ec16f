"""Every mistake ends in one line that holds the place, the value and the remedy."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from configs.checks import check_config
from configs.errors import ConfigError
from configs.loader import load_config
from configs.schema import RunConfig
from configs.sglang_needs import install_command
from tests.configs.trees import write_good, write_rows
from tests.processes import timed


@dataclass(frozen=True)
class Mistake:
    """overrides: what the user gives. parts: what the line has to hold: place, value, remedy."""

    overrides: tuple[str, ...]
    parts: tuple[str, ...]


def mistake(*overrides: str, line: tuple[str, ...]) -> Mistake:
    return Mistake(overrides, line)


WRONG_VALUES = [
    mistake("rollout.num_sample=4", line=("--set rollout.num_sample=4", "unknown key", "4", "rollout.num_samples?")),
    mistake("actor.lr=1e-6", line=("actor.lr", "1e-06", "did you mean actor.optimizer.lr?")),
    mistake("lr=1e-6", line=("lr", "did you mean actor.optimizer.lr?")),
    mistake("kl.zzz=1", line=("kl.zzz", "valid here: placement, estimator, coef")),
    mistake("resources.pools.a.rank=2", line=("resources.pools.a.rank", "2", "resources.pools.a.ranks?")),
    mistake("rewards.functions.0.wieght=2", line=("rewards.functions.0.wieght", "rewards.functions.0.weight?")),
    mistake("rewards.functions.7.weight=2", line=("'7'", "list of 1", "whole list")),
    mistake("kl.estimator=k4", line=("kl.estimator", "'k4'", "k1, k2, k3")),
    mistake("loss.aggregation=tokenmean", line=("loss.aggregation", "'tokenmean'", "did you mean token_mean?")),
    mistake("resources.placement={actr: main}", line=("resources.placement.actr", "did you mean actor?")),
    mistake(
        "evaluation.every=0", line=("evaluation.every", "greater than 0", "null means: off", "evaluation.every=null")
    ),
    mistake("loss.dual_clip=off", line=("loss.dual_clip", "'off'", "--set loss.dual_clip=null")),
    mistake("actor.optimizer.lr=-1", line=("actor.optimizer.lr", "-1", "greater than 0")),
    mistake("actor.optimizer.lr=fast", line=("actor.optimizer.lr", "'fast'", "should be a number")),
    mistake("actor.optimizer.lr=.nan", line=("actor.optimizer.lr", "nan", "finite")),
    mistake("actor.optimizer.betas=[0.9]", line=("actor.optimizer.betas.1", "missing", "give it a value")),
    mistake("rollout.top_p=0", line=("rollout.top_p", "0", "greater than 0")),
    mistake("rewards.functions=rewards.py:correct", line=("should be a list", "write [{path: rewards.py:correct}]")),
    mistake("rewards.functions={path: a}", line=("should be a list", "write [{path: a}]")),
    mistake('rewards.functions="@a: {"', line=("should be a list", 'write [{path: "@a: {"}]')),
    mistake("data.train=rows.jsonl", line=("should be a section", "write {path: rows.jsonl}")),
    mistake("rollout.stop_token_ids=5", line=("should be a list", "write [5]")),
    mistake("training.num_iterations=x", line=("'x'", "should be a whole number")),
    mistake("deterministic=5", line=("5", "should be true or false")),
    mistake("kl.coef=", line=("--set kl.coef=", "no value was given", "leave the key out")),
    mistake("rollout=3", line=("rollout", "3", "a section")),
    mistake("seed=1.5", line=("seed", "1.5", "should be a whole number")),
    *(
        mistake(f"name={name}", line=("name", repr(name), "means something else in commands"))
        for name in ("latest", "-x", "a@3", "checkpoint:x")
    ),
    mistake(f"a{chr(27)}[31m=1", line=(r"a\x1b[31m",)),
    mistake("name=a/b", line=("name", "'a/b'", "usable as a folder name")),
    mistake("name=7", line=("name", "7", "quote")),
    mistake("seed", line=("--set seed", "KEY=VALUE")),
    mistake("=3", line=("--set =3", "KEY=VALUE")),
    mistake("seed=[1", line=("--set seed=[1", "not valid YAML", "check quotes")),
    mistake("algorithm.x=1", line=("--set algorithm.x=1", "'grpo'", "set algorithm")),
]

APART = "{num_ranks: 5, pools: {a: {ranks: 2}, b: {ranks: 3}}, placement: {rollout: b}}"
"""Rollout engines on a pool of their own."""

IMPOSSIBLE = [
    mistake("storage.keep_rollouts_every=5", line=("storage.keep_rollouts_every", "set that too")),
    mistake(
        "storage.keep_rollouts=5",
        "data.seen_prompts=last",
        line=("storage.keep_rollouts", "data.seen_prompts=last", "leave one of them out"),
    ),
    mistake("output=gs://bucket/x", line=("output", "'gs://bucket/x'", "write s3://BUCKET/FOLDER")),
    mistake("algorithm=grppo", line=("algorithm", "'grppo'", "did you mean grpo?", "module:function")),
    mistake("algorithm=GRPO", line=("algorithm", "'GRPO'", "did you mean grpo?")),
    mistake("algorithm=no_such_module:f", line=("algorithm", "no_such_module", "install or correct")),
    mistake("algorithm=./nope.py:f", line=("algorithm", "nope.py", "No such file")),
    mistake("advantage.estimator=gea", line=("advantage.estimator", "'gea'", "did you mean gae?")),
    mistake("advantage.estimator=gae", line=("advantage.estimator", "gae needs a critic", "use ppo")),
    mistake(
        "algorithm=remax",
        "critic.path=organisation/critic",
        line=("critic.path", "organisation/critic", "remax has no critic", "use algorithm ppo"),
    ),
    mistake("critic.init={model_type: gpt2}", line=("critic.init", "grpo has no critic", "set it to null")),
    mistake("algorithm=remax", "advantage.estimator=gae", line=("advantage.estimator", "gae", "remax has not")),
    mistake("algorithm=remax", "advantage.estimator=rloo", line=("advantage.estimator", "rloo", "greedy responses")),
    mistake("advantage.estimator=remax", line=("advantage.estimator", "grpo does not generate", "algorithm remax")),
    mistake("loss.policy=dpo", line=("loss.policy", "dpo", "preference pairs", "use algorithm dpo")),
    mistake("algorithm=dpo", "loss.policy=clipped", line=("loss.policy", "clipped needs advantages", "set it to dpo")),
    mistake("algorithm=safe_rlhf", line=("costs.functions", "cost.path", "no cost to limit", "set one of them")),
    mistake(
        "rewards.over_long.buffer=4",
        "rollout.environment.path=calendar:Calendar",
        line=("rewards.over_long.buffer", "limits a turn", "expected_length"),
    ),
    mistake("loss.policy=cliped", line=("loss.policy", "'cliped'", "clipped")),
    mistake("rewards.functions.0.path=exact", line=("rewards.functions.0.path", "'exact'", "exact_match?")),
    mistake("rewards.functions=[]", line=("rewards.functions", "grpo has no reward", "set one of them")),
    mistake("algorithm=ppo", "rewards.functions=[]", line=("rewards.functions", "ppo has no reward")),
    mistake(
        "rewards.functions=[{path: length}, {path: length}]",
        line=("rewards.functions", "2 are named 'length'", "its own `name`"),
    ),
    mistake("rewards.functions.0.name=''", line=("rewards.functions.0.name", "''", "empty text")),
    mistake(
        "rewards.functions.0.name=a/b",
        line=("rewards.functions.0.name", "'a/b'", "1 to 100 printable characters, no slash"),
    ),
    mistake(
        "rewards.functions.0.name=model",
        "reward.path=organisation/reward",
        line=("rewards.functions.0.name", "'model'", "the reward model's part", "another `name`"),
    ),
    mistake(
        "rewards.functions.0.name=environment",
        "rollout.environment.path=calendar:Calendar",
        line=("rewards.functions.0.name", "the part of rollout.environment", "another `name`"),
    ),
    mistake(
        "algorithm=safe_rlhf",
        "cost.path=organisation/cost",
        "costs.functions=[{path: length, name: model}]",
        line=("costs.functions.0.name", "'model'", "the cost model's part", "another `name`"),
    ),
    mistake("data.answer_column=", line=("rewards.functions.0.path", "data.answer_column", "name the column")),
    mistake(
        "rewards.functions.0.path=reasoning_gym",
        "data.answer_column=",
        line=("rewards.functions.0.path", "generated tasks", "data.train.source"),
    ),
    mistake("actor.path=", line=("actor.path", "not set", "grpo trains the actor", "init")),
    mistake("algorithm=reward_model", line=("reward.path", "trains the reward", "name a model directory")),
    mistake("actor={init: {model_type: gpt2}}", line=("tokenizer", "not set", "name a tokenizer")),
    mistake("actor.init={hidden_size: 8}", line=("actor.init", "model_type", "qwen2")),
    mistake("actor.path=./no/model", line=("actor.path", "./no/model", "give a model directory or a hub id")),
    mistake("actor.path=a/b/c", line=("actor.path", "'a/b/c'", "ORGANISATION/NAME")),
    mistake("tokenizer=~/no_tokenizer", line=("tokenizer", "~/no_tokenizer", "hub id")),
    mistake("reference.path=checkpoint:gone/actor", line=("reference.path", "checkpoint:gone/actor", "give its path")),
    mistake("rollout.num_samples=1", line=("rollout.num_samples", "1", "set it to 2 or more")),
    mistake(
        "rollout.min_new_tokens=9",
        "rollout.max_new_tokens=8",
        line=("rollout.min_new_tokens", "9", "8", "lower one or raise the other"),
    ),
    mistake("rollout.engine_arguments={page_size: 16}", line=("rollout.engine_arguments", "torch", "remove them")),
    mistake(
        "rollout.engine=sglang",
        "rollout.engine_arguments={tp_size: 2}",
        line=("rollout.engine_arguments.tp_size", "rollout.tensor_parallel_size", "remove this"),
    ),
    mistake(
        "rollout.engine=sglang",
        "rollout.engine_arguments={quantization: fp8}",
        line=("rollout.engine_arguments.quantization", "in place", "remove it"),
    ),
    mistake("rollout.temperature=0", line=("rollout.temperature", "0 is greedy", "above 0")),
    mistake(
        "algorithm=reinforce_pp",
        "rollout.num_samples=1",
        "advantage.filter_groups=true",
        line=("advantage.filter_groups", "rollout.num_samples 1", "2 or more"),
    ),
    mistake("kl={target: 6, placement: none}", line=("kl.target", "6", "set kl.target to null")),
    mistake(
        "loss.rollout_correction=mask",
        "rollout.recompute_log_probs=false",
        line=("loss.rollout_correction", "mask", "rollout.recompute_log_probs", "this to none"),
    ),
    mistake("rewards.over_long.expected_length=9", line=("rewards.over_long.expected_length", "9", "over_long.buffer")),
    mistake("rewards.over_long.buffer=129", line=("rewards.over_long.buffer", "129", "rollout.max_new_tokens 128")),
    mistake(
        "rewards.over_long={buffer: 4, expected_length: 128}",
        line=("rewards.over_long.expected_length", "128", "lower it"),
    ),
    mistake(
        "rewards.over_long.buffer=4",
        "rewards.functions.0.name=over_long",
        line=("rewards.functions.0.name", "'over_long'", "another `name`"),
    ),
    mistake("loss.fixed_length=9", line=("loss.fixed_length", "9", "sequence_mean_token_mean", "null")),
    mistake("training.max_staleness=1", line=("training.max_staleness", "1", "set it to 0")),
    mistake("training.num_mini_batches=9", line=("training.num_mini_batches", "9", "data.batch_size 8", "lower it")),
    mistake("actor.optimizer.betas=[0.9, 1]", line=("actor.optimizer.betas", "1", "below 1")),
    mistake("evaluation.every=5", line=("evaluation.every", "5", "data.validation", "null")),
    mistake("data.train=", line=("data.train", "not set", "data.train.path=")),
    mistake(
        "resources={pools: {a: {ranks: 2}, b: {ranks: 1}}, num_ranks: 4, placement: {critic: b}}",
        line=("resources.num_ranks", "4", "3", "set resources.num_ranks to 3"),
    ),
    mistake(
        f"resources={APART}",
        line=("resources.placement.rollout", "pool of their own (b)", "rollout.engine: sglang", "it is torch"),
    ),
    mistake(
        f"resources={APART[:-2]}, reference: b}}}}",
        "rollout.engine=sglang",
        line=("resources.placement.rollout", "pool 'b' also holds reference"),
    ),
    mistake(
        f"resources={APART}",
        "rollout={engine: sglang, tensor_parallel_size: 2}",
        line=("rollout.tensor_parallel_size", "2 does not divide the 3 ranks of pool 'b'"),
    ),
    mistake(
        "rollout.tensor_parallel_size=2",
        line=("rollout.tensor_parallel_size", "2 is of SGLang's engines", "rollout.engine is torch", "set it to 1"),
    ),
    mistake("resources.placement={actor: big}", line=("resources.placement.actor", "'big'", "main", "resources.pools")),
    mistake(
        "resources={pools: {a: {ranks: 2}, b: {ranks: 1}}, num_ranks: 3}",
        line=("resources.pools.b", "holds no model", "place a role in it"),
    ),
    mistake("resources.num_ranks=100000", line=("resources.num_ranks", "100000", "GiB", "lower it")),
    mistake("rollout.engine=sglang", line=("rollout.engine", "sglang", install_command())),
    mistake("logging.wandb_project=p", line=("logging.wandb_project", "wandb", "pip install 'hybridflow[wandb]'")),
    mistake("output=rows.jsonl", line=("output", "rows.jsonl", "name a folder")),
    mistake("data.train.path=gone.jsonl", line=("data.train.path", "gone.jsonl", "no such file")),
    mistake("data.train.path=good.yaml", line=("data.train.path", "'.yaml'", ".jsonl")),
    mistake(
        "data.prompt_column=question",
        line=("data.train.path", "rows.jsonl", "'question'", "prompt, response", "data.prompt_column"),
    ),
    mistake("data.messages_column=prompt", line=("data.train.path", "'prompt'", "data.prompt_column")),
    mistake("data.answer_column=solution", line=("data.train.path", "'solution'", "answer", "data.answer_column")),
    mistake(
        "data.answer_column=anwser", line=("data.train.path", "'anwser'", "did you mean 'answer'?", "answer_column")
    ),
    mistake("data.validation.path=gone.parquet", line=("data.validation.path", "gone.parquet", "no such file")),
]


@pytest.mark.parametrize("name", ["quickstart_sft", "quickstart_reward", "quickstart_ppo"])
def test_a_part_of_the_quickstart_by_itself_leads_to_the_command_that_writes_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{name}: .*`hybridflow quickstart`, which writes its data"):
        check_config(load_config(name), source=name)
    elsewhere = load_config(name, [f"data.train.path={write_rows(tmp_path)}"])
    with pytest.raises(ConfigError, match="quickstart/data/tokenizer|quickstart-sft"):
        check_config(elsewhere, source=name)


def error_line(path: Path, overrides: tuple[str, ...]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(str(path), overrides), source=path.name)
    return str(caught.value)


@pytest.mark.parametrize("case", WRONG_VALUES + IMPOSSIBLE, ids=lambda case: " ".join(case.overrides))
def test_a_mistake_is_one_line_with_place_value_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Mistake
) -> None:
    monkeypatch.chdir(tmp_path)
    if "rollout.engine=sglang" in case.overrides or "logging.wandb_project=p" in case.overrides:
        hide_packages(monkeypatch, "sglang", "wandb")
    line = error_line(write_good(tmp_path), case.overrides)
    assert "\n" not in line and len(line) < 400
    for part in case.parts:
        assert part in line, f"{part!r} is not in {line!r}"


def hide_packages(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As on a machine where they are not installed."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def test_a_configuration_without_a_fault_passes(tmp_path: Path) -> None:
    check_config(load_config(str(write_good(tmp_path)), []))


def test_a_key_in_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: x\nrollout:\n  num_sample: 4\n", encoding="utf-8")
    assert error_line(path, ()).startswith(f"{path}:3: rollout.num_sample: unknown key (value 4)")


def test_further_mistakes_are_counted_and_carried(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kl\.zz.*\(and 2 more\)$") as caught:
        load_config(str(write_good(tmp_path)), ("kl.zz=1", "kl.yy=1", "seed=x"))
    assert [part in line for part, line in zip(("kl.zz", "kl.yy", "seed"), caught.value.problems, strict=True)]


def test_a_parquet_file_is_asked_for_its_schema(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"question": ["1+1"], "answer": ["2"]}), path)
    good = str(write_good(tmp_path))
    line = error_line(Path(good), (f"data.train.path={path}",))
    assert "'prompt'" in line and "question, answer" in line and "data.prompt_column" in line
    check_config(load_config(good, [f"data.train.path={path}", "data.prompt_column=question"]))


def test_a_mark_at_the_beginning_of_a_file_is_no_part_of_its_first_row(tmp_path: Path) -> None:
    good = write_good(tmp_path)
    (tmp_path / "marked.jsonl").write_text(GOOD_ROW, encoding="utf-8-sig")
    check_config(load_config(str(good), [f"data.train.path={tmp_path / 'marked.jsonl'}"]))


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("empty.jsonl", b"\n\n", ("no rows", "at least one")),
        ("text.jsonl", b"hello\n", ("not a JSON object",)),
        ("list.jsonl", b"[1]\n", ("line 1", "[1]", "one JSON object a line")),
        ("latin.jsonl", b'{"prompt": "\xe9"}\n', ("JSON",)),
        ("deep.jsonl", b"[" * 9000, ("not a JSON object",)),
        ("fake.parquet", b"PAR?", ("not a Parquet file",)),
        ("number.jsonl", b'{"prompt": 3, "answer": "3"}\n', ("'prompt'", "3", "not text")),
        ("chat.jsonl", b'{"prompt": [], "answer": "3"}\n', ("lists", "data.messages_column")),
    ],
)
def test_an_unreadable_data_file_is_named(tmp_path: Path, name: str, content: bytes, parts: tuple[str, ...]) -> None:
    (tmp_path / name).write_bytes(content)
    line = error_line(write_good(tmp_path), (f"data.train.path={tmp_path / name}",))
    for part in (name, "data.train.path", *parts):
        assert part in line, f"{part!r} is not in {line!r}"


def test_a_pipe_for_a_data_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    line = error_line(write_good(tmp_path), (f"data.train.path={tmp_path / 'pipe.jsonl'}",))
    assert "pipe.jsonl: is no regular file" in line


@pytest.mark.parametrize(
    ("columns", "part"),
    [
        ({"prompt": [b"x"], "answer": [b"\xff"]}, "holds 'binary', not text"),
        ({"prompt": ["x"], "answer": [b"\xff"]}, "'answer' is b'\\xff', not text"),
        ({"prompt": ["x"], "answer": ["2"], "again": ["x"]}, "two columns 'prompt'"),
    ],
)
def test_a_parquet_file_with_bytes_or_a_column_twice_is_refused(
    tmp_path: Path, columns: dict[str, list[object]], part: str
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ["prompt" if name == "again" else name for name in columns]
    pq.write_table(pa.table([pa.array(values) for values in columns.values()], names=names), tmp_path / "p.parquet")
    assert part in error_line(write_good(tmp_path), (f"data.train.path={tmp_path / 'p.parquet'}",))


GOOD_ROW = '{"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3", "answer": "2"}'


@pytest.mark.parametrize(
    ("third", "overrides", "parts"),
    [
        ('{"prompt": null, "answer": "2"}', (), ("line 3", "'prompt' is null, not text", "correct the row")),
        ('{"prompt": "x"}', (), ("line 3", "no column 'answer'", "data.answer_column")),
        ("{broken", (), ("line 3 is not JSON", "one JSON object a line")),
        ("[" * 9000, (), ("line 3 is not JSON",)),
        ("7", (), ("line 3 is 7",)),
        ('{"prompt": "x", "response": 3}', ("algorithm=sft",), ("line 3", "'response' is 3")),
        (r'{"prompt": "x", "answer": ["a\uD800b"]}', (), ("line 3: column 'answer'", r"\ud800, half of a character")),
    ],
)
def test_a_bad_row_behind_a_good_one_is_named_with_its_line(
    tmp_path: Path, third: str, overrides: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    good = write_good(tmp_path)
    (tmp_path / "rows.jsonl").write_text(f"{GOOD_ROW}\n\n{third}\n")
    line = error_line(good, overrides)
    assert "rows.jsonl" in line and "\n" not in line and all(part in line for part in parts), line
    check_config(load_config(str(good), [*overrides, "data.train.size=1"]))


def test_a_null_in_a_parquet_row_and_a_message_without_a_role_are_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, good = tmp_path / "p.parquet", write_good(tmp_path)
    pq.write_table(pa.table({"prompt": ["a", None], "answer": ["1", "2"]}), path)
    assert "row 2: column 'prompt' is null" in error_line(good, (f"data.train.path={path}",))
    rows = tmp_path / "chat.jsonl"
    message = {"role": "user", "content": "x"}
    rows.write_text("".join(json.dumps({"m": m, "answer": "1"}) + "\n" for m in ([message], [{"content": "x"}])))
    line = error_line(good, (f"data.train.path={rows}", "data.messages_column=m"))
    assert "line 2" in line and "`role` and `content`" in line


@pytest.mark.parametrize(
    ("train", "parts"),
    [
        ("{source: reasoning_gym, path: chain_sun}", ("data.train.path", "'chain_sun'", "did you mean chain_sum?")),
        ("{source: reasoning_gym, path: zzz}", ("'zzz'", "such as chain_sum")),
        (
            "{source: reasoning_gym, path: chain_sum, options: {min_term: 2}}",
            ("data.train.options.min_term", "did you mean min_terms?"),
        ),
        ("{source: reasoning_gym, path: chain_sum, options: {seed: 2}}", ("set data.train.seed",)),
        ("{source: datasets, path: ./gone}", ("data.train.path", "./gone")),
        ("{source: datasets, path: json, options: {data_files: gone.jsonl}}", ("data_files", "gone.jsonl")),
        ("{source: datasets, path: json, options: {data_files: {train: [gone.json]}}}", ("data_files", "gone.json")),
    ],
)
def test_a_source_that_another_package_reads_is_looked_at_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: str, parts: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = error_line(write_good(tmp_path), (f"data.train={train}", "rewards.functions=[{path: length}]"))
    assert all(part in line for part in parts), line


def test_a_function_in_a_file_is_looked_for_without_running_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit\n\ndef my_reward(sample):\n    return 1.0\n", encoding="utf-8")
    good = write_good(tmp_path)
    line = error_line(good, (f"rewards.functions.0.path={file}:my_rewrad",))
    assert "mine.py" in line and "did you mean my_reward?" in line
    check_config(load_config(str(good), [f"rewards.functions.0.path={file}:my_reward"]))
    file.write_text("import os\nasync def rloo(models, prompts): ...\n", encoding="utf-8")
    assert "did you mean rloo?" in error_line(good, (f"algorithm={file}:rlo",))


def test_a_file_with_another_suffix_is_told_of(tmp_path: Path) -> None:
    good = write_good(tmp_path)
    line = error_line(good.with_suffix(".yml"), ())
    assert line.endswith(f"did you mean {good}?")


@pytest.mark.parametrize(
    ("algorithm", "column"),
    [("sft", "response"), ("reward_model", "chosen"), ("dpo", "chosen"), ("ppo", "answer")],
)
def test_each_algorithm_asks_for_its_own_columns(tmp_path: Path, algorithm: str, column: str) -> None:
    good = write_good(tmp_path)
    overrides = [f"algorithm={algorithm}", "reward.path=organisation/reward"]
    check_config(load_config(str(good), overrides))
    rows = tmp_path / "few.jsonl"
    rows.write_text('{"prompt": "1+1="}\n', encoding="utf-8")
    assert repr(column) in error_line(good, (*overrides, f"data.train.path={rows}"))
    held_out = (*overrides, f"data.validation={{path: {rows}}}")
    assert f"that {algorithm} reads, or do without: --set data.validation=null" in error_line(good, held_out)
    every = error_line(good, (*held_out, "evaluation.every=5"))
    assert "--set data.validation=null --set evaluation.every=null" in every
    named = error_line(good, (*overrides, f"evaluation.datasets={{easy: {{path: {rows}}}}}"))
    assert "take easy out of evaluation.datasets" in named


def test_a_mistake_is_reported_within_two_seconds_and_without_torch(tmp_path: Path) -> None:
    good = write_good(tmp_path)
    program = (
        "import sys\n"
        "from flows.cli import main\n"
        f"code = main(['run', {str(good)!r}, '--set', 'data.prompt_column=question'])\n"
        "heavy = {'torch', 'prefect', 'transformers', 'distributed'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "raise SystemExit(code)\n"
    )
    done, seconds = timed(["-c", program])
    assert seconds < 2
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "'question'" in done.stderr


def test_known_names_are_those_that_are_registered() -> None:
    from configs import checks, objective_checks
    from pipeline.advantages import ESTIMATORS
    from pipeline.algorithms import ALGORITHMS
    from pipeline.losses import LOSSES
    from pipeline.registry import Registry
    from workers.verifiers import BUILT_IN

    def ours(registry: Registry[Any]) -> set[str]:
        """Without what other tests have registered in this process."""
        return {name for name in registry.names() if registry.get(name).__module__.startswith("pipeline.")}

    assert {*checks.ALGORITHMS, checks.EVALUATE} == ours(ALGORITHMS)
    assert set(objective_checks.ESTIMATORS) == ours(ESTIMATORS)
    assert set(objective_checks.POLICY_LOSSES) <= set(LOSSES.names())
    assert set(checks.BUILT_IN_REWARDS) == set(BUILT_IN)


def test_defaults_alone_are_refused_with_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"actor\.path"):
        check_config(RunConfig())
