"""The quickstart: SFT, a reward model and PPO on a small model made from scratch, judged by a known rule."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.loader import load_config
from configs.schema import RunConfig
from flows.hints import typed_command
from flows.preflight import check
from flows.quickstart_task import write_task
from storage.locations import Location
from storage.metrics import read_metrics
from storage.plots import plot_run, series, text_plot

STAGES = ("sft", "reward", "ppo")
DATA = "quickstart-data"

FILES: dict[str, tuple[str, str | None]] = {
    "sft": ("sft.jsonl", None),
    "reward": ("pairs.jsonl", "pairs_heldout.jsonl"),
    "ppo": ("prompts.jsonl", None),
}
TITLES = {
    "sft": "a language model learns from example replies (SFT)",
    "reward": "a reward model learns from preference pairs",
    "ppo": "PPO: actor, critic, reference and reward model",
}
ORIGINS: dict[str, Sequence[tuple[str, str, str]]] = {
    "sft": (),
    "reward": (("reward", "sft", "actor"),),
    "ppo": (
        ("actor", "sft", "actor"),
        ("reference", "sft", "actor"),
        ("critic", "reward", "reward"),
        ("reward", "reward", "reward"),
    ),
}
"""For each stage: the roles that start from an earlier one, that stage, and the role it saved."""

MIN_PAIR_ACCURACY = 0.8
"""The reward model is right on at least this share of held-out pairs."""
MIN_RULE_GAIN = 0.3
"""PPO raises the rule's mean score (0 to 1) on held-out prompts by at least this."""
MAX_KL = 8.0
"""KL(policy || reference) on held-out prompts stays under this, in nats a reply."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The three numbers on held-out rows."""

    pair_accuracy: float
    rule_before: float
    rule_after: float
    kl: float

    def lines(self) -> list[str]:
        gain = self.rule_after - self.rule_before
        return [
            _line("reward model, held-out pairs right", f"{self.pair_accuracy:.1%}", f">= {MIN_PAIR_ACCURACY:.0%}"),
            _line(
                "rule's score on held-out prompts",
                f"{self.rule_before:.2f} -> {self.rule_after:.2f} ({gain:+.2f})",
                f"gain >= {MIN_RULE_GAIN:.2f}",
            ),
            _line("KL to the reference, nats a reply", f"{self.kl:.2f}", f"<= {MAX_KL:.1f}"),
        ]

    @property
    def within_bounds(self) -> bool:
        return (
            self.pair_accuracy >= MIN_PAIR_ACCURACY
            and self.rule_after - self.rule_before >= MIN_RULE_GAIN
            and self.kl <= MAX_KL
        )


def quickstart(parent: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Write the task, run the three runs, judge the result.

    The document: status (completed or stopped), the run directories, the three numbers and their
    bounds, seconds. Raises UserError as a run does.
    """
    started = time.perf_counter()
    say: Callable[[str], None] = (lambda _: None) if quiet else (lambda text: print(text, flush=True))
    parent = parent.expanduser().resolve()
    data = parent / DATA
    say(f"quickstart: writing the data to {data}")
    write_task(data)
    runs, stopped = asyncio.run(_run_chain(parent, data, say, quiet=quiet))
    document: dict[str, Any] = {"status": "stopped" if stopped else "completed", "runs": runs}
    if stopped:
        say(
            f"stopped; `{typed_command()} resume {list(runs.values())[-1]}` finishes this run, "
            f"`{typed_command()} quickstart` starts afresh"
        )
        return document
    say("judging the models on held-out rows")
    judgement = judge(data, Path(runs["sft"]), Path(runs["reward"]), Path(runs["ppo"]))
    plot = plot_run(runs["ppo"])
    seconds = time.perf_counter() - started
    _report(judgement, Path(runs["ppo"]), plot, seconds, say)
    return document | {
        **asdict(judgement),
        "within_bounds": judgement.within_bounds,
        "bounds": {"pair_accuracy": MIN_PAIR_ACCURACY, "rule_gain": MIN_RULE_GAIN, "kl": MAX_KL},
        "plot": str(plot),
        "seconds": seconds,
    }


async def _run_chain(
    parent: Path, data: Path, say: Callable[[str], None], *, quiet: bool
) -> tuple[dict[str, str], bool]:
    """(run directories by stage, whether the user stopped one); one Prefect server, one cluster."""
    from flows.run import ranks_needed, session

    runs: dict[str, str] = {}
    first = stage_config("sft", parent, data, runs)
    async with session(first, parent=parent, num_workers=ranks_needed(first), quiet=quiet) as shared:
        for number, stage in enumerate(STAGES, start=1):
            say(f"quickstart {number} of {len(STAGES)}: {TITLES[stage]}")
            summary = await shared.run(stage_config(stage, parent, data, runs))
            runs[stage] = summary.run_dir
            if summary.status != "completed":
                return runs, True
    return runs, False


def stage_config(stage: str, parent: Path, data: Path, runs: dict[str, str]) -> RunConfig:
    """The shipped configuration of a stage, with the paths of this quickstart."""
    train, validation = FILES[stage]
    values = {"output": str(parent), "tokenizer": str(data / "tokenizer"), "data.train.path": str(data / train)}
    if validation is not None:
        values["data.validation.path"] = str(data / validation)
    for role, source, saved in ORIGINS[stage]:
        values[f"{role}.path"] = f"checkpoint:{runs[source]}/{saved}"
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    config = load_config(f"quickstart_{stage}", overrides)
    check(config, source=f"quickstart_{stage}")
    return config


def judge(data: Path, sft: Path, reward: Path, ppo: Path, *, seed: int = 0) -> Judgement:
    """The three numbers, from the runs' last checkpoints."""
    from flows import quickstart_evaluation as evaluation

    prompts = [row["prompt"] for row in evaluation.read_rows(data / "prompts_heldout.jsonl")]
    pairs = evaluation.read_rows(data / "pairs_heldout.jsonl")
    limit = load_config("quickstart_ppo").rollout.max_new_tokens
    with evaluation.quiet_libraries():
        before_dir, after_dir = evaluation.exported(sft, "actor"), evaluation.exported(ppo, "actor")
        before = evaluation.sample_replies(before_dir, prompts, max_new_tokens=limit, seed=seed)
        after = evaluation.sample_replies(after_dir, prompts, max_new_tokens=limit, seed=seed)
        return Judgement(
            pair_accuracy=evaluation.pair_accuracy(evaluation.exported(reward, "reward"), pairs),
            rule_before=before.rule,
            rule_after=after.rule,
            kl=evaluation.kl_per_sequence(after, before_dir),
        )


def _report(judgement: Judgement, run: Path, plot: Location, seconds: float, say: Callable[[str], None]) -> None:
    last = load_config("quickstart_ppo").training.num_iterations - 1
    say("")
    for line in judgement.lines():
        say(line)
    if not judgement.within_bounds:
        say("A number is outside its bound: that is a fault, please report it with the run directory.")
    say("")
    for line in _charts(run):
        say(line)
    typed = typed_command()
    say(
        f"drawn: {plot}\n\n"
        f"The PPO run is in {run} ({seconds:.0f} s in all). Next:\n"
        f"  {typed} rollouts show {run} --iteration 0\n"
        f"      what the policy said at first, with rewards and advantages; --iteration {last}: at the end\n"
        f"  {typed} resume {run} --set training.num_iterations={2 * (last + 1)}\n"
        f"      train on\n"
        f"  {typed} ui --runs {run.parent}\n"
        f"      the runs in Prefect's web page"
    )


def _charts(run: Path) -> list[str]:
    """Reward and KL of each iteration as text."""
    lines = read_metrics(run / "metrics.jsonl")
    shown = {"reward_mean": "reward of each iteration", "kl": "KL of each iteration, nats a reply"}
    return [text_plot(series(lines, name)[1], height=4, label=label) for name, label in shown.items()]


def _line(what: str, value: str, bound: str) -> str:
    return f"  {what:<36} {value:<24} {bound}"
