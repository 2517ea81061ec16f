"""What a run's report says: metrics of every iteration, and some samples of some iterations.

Bounded however long the run is: at most `max_iterations` iterations are opened (the first, the last, those of
the best and the worst mean reward, others evenly between), and of each the best, the worst and some other
samples are kept, with at most `MAX_TOKENS` tokens. Everything read is JSON or Zarr; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.random import permutation
from pipeline.rollouts import Array
from storage.evaluation_results import OVER_PROMPTS, between, evaluations_of
from storage.jsonable import jsonable
from storage.locations import Location, is_there
from storage.metrics import read_metrics
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from storage.samples import Samples, known_columns, load_samples
from storage.token_text import TokenTexts

MAX_TOKENS = 1024
"""Of a sample's response."""
MAX_CHARACTERS = 4000
"""Of a prompt."""
MAX_ESTIMATES = 400
"""Rows of the table of evaluations."""
BOUNDS = ("_low", "_high")
HEAT_COLUMNS = ("advantages", "log_prob_gap", "ref_gap", "entropy", "values", "token_rewards")
TEXTS = ("prompt_text", "text")
PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward_mean",)),
    ("KL to the reference, per sequence", ("kl",)),
    ("response tokens", ("response_length_mean", "response_length_max")),
    ("seconds an iteration", ("time/iteration",)),
    ("evaluation: reward", ("eval/reward_mean",)),
    ("accuracy", ("accuracy", "eval/accuracy")),
    ("loss", ("actor/loss", "loss", "reward/loss")),
    ("gap of log-probabilities, mean", ("rollout_gap_mean",)),
    ("entropy, nats a token", ("entropy_mean",)),
    ("tokens per second", ("tokens_per_second",)),
)


def collect(
    run: RunDirectory, texts: TokenTexts, *, max_iterations: int = 24, per_iteration: int = 12
) -> dict[str, Any]:
    """The report's data, as JSON types. Raises StorageError for a damaged file."""
    lines = read_metrics(run.metrics)
    store = RolloutStore(run.rollouts)
    stored = store.names()
    chosen = spread(stored, _rewards(lines), max_iterations)
    samples = [sample for iteration in chosen for sample in _samples(store, iteration, texts, per_iteration)]
    metrics = _columns(lines)
    return {
        "run": run.path.name,
        "about": f"{len(lines)} iterations logged, {len(stored)} stored. Metrics of all of them; "
        f"{len(samples)} samples of {len(chosen)} iterations: the best, the worst and some others of each, "
        f"at most {MAX_TOKENS} tokens of a response. `hybridflow rollouts grep` looks through all samples.",
        "facts": _facts(run, lines),
        "evaluations": _evaluations(lines),
        "config": run.config_yaml.read_bytes().decode(errors="replace") if is_there(run.config_yaml) else "",
        "iterations": [line["iteration"] for line in lines],
        "metrics": metrics,
        "panels": [[title, list(names)] for title, names in PANELS],
        "scales": _scales(samples),
        "samples": samples,
    }


def spread(stored: Sequence[int], rewards: Mapping[int, float], count: int) -> list[int]:
    """At most `count` of the stored iterations, ascending: first, last, best, worst, then evenly between."""
    if len(stored) <= count:
        return list(stored)
    scored = {iteration: rewards[iteration] for iteration in stored if iteration in rewards}
    kept = dict.fromkeys([stored[0], stored[-1]])
    if scored:
        kept |= dict.fromkeys([max(scored, key=scored.__getitem__), min(scored, key=scored.__getitem__)])
    places = np.linspace(0, len(stored) - 1, max(count - len(kept), 0) + 2)[1:-1].round().astype(int)
    kept |= dict.fromkeys(stored[place] for place in places)
    return sorted(list(kept)[:count])


def _rewards(lines: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    return {
        line["iteration"]: float(line["reward_mean"])
        for line in lines
        if isinstance(line.get("reward_mean"), int | float)
    }


def _columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Metric name to its value in each iteration; null where it was not logged. Six digits are kept."""
    names = dict.fromkeys(name for line in lines for name, value in line.items() if _is_number(value))
    for name in ("iteration", "ended_at"):
        names.pop(name, None)
    return {name: [_short(line.get(name)) for line in lines] for name in names}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> float | int | None:
    return float(f"{value:.6g}") if isinstance(value, float) else value if _is_number(value) else None


def _evaluations(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of step, data set, estimate, value and interval: of each estimate that has an interval, newest first."""
    return [
        [str(entry.step), dataset or "validation", name, f"{metrics[name]:.4g}", between(metrics, name)]
        for entry in reversed(evaluations_of(lines))
        for dataset, metrics in entry.datasets.items()
        for name in metrics
        if not name.endswith(BOUNDS) and (name.startswith(OVER_PROMPTS) or f"{name}_low" in metrics)
    ][:MAX_ESTIMATES]


def _facts(run: RunDirectory, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    config = run.config()
    last = lines[-1] if lines else {}
    facts: dict[str, Any] = jsonable(
        {
            "algorithm": config.algorithm,
            "model": config.actor.path,
            "iterations": f"{len(lines)} of {config.training.num_iterations}",
            "batch": f"{config.data.batch_size} prompts x {config.rollout.num_samples} samples",
            "last reward": last.get("reward_mean"),
            "last KL": last.get("kl"),
        }
    )
    return facts


def _samples(store: RolloutStore, iteration: int, texts: TokenTexts, count: int) -> list[dict[str, Any]]:
    known = known_columns(store, iteration)
    if "token_ids" not in known:
        return []
    numbers = [n for n in known if n in ("reward", "length", "finish_reason") or n.startswith("reward/")]
    heat = [name for name in HEAT_COLUMNS if name in known]
    names = dict.fromkeys([*numbers, "token_ids", *heat, *(n for n in (*TEXTS, "prompt_length") if n in known)])
    samples = load_samples(store, iteration, list(names))
    rows = pick(samples.sample("reward") if "reward" in known else None, len(samples), count, seed=iteration)
    return [_sample(samples, row, why, numbers, heat, texts) for row, why in rows.items()]


def pick(reward: Array | None, num_rows: int, count: int, *, seed: int) -> dict[int, str]:
    """Rows and why: a third with the highest, a third with the lowest reward, the rest drawn at random."""
    rows: dict[int, str] = {}
    if reward is not None:
        order = [int(row) for row in np.argsort(reward, kind="stable") if np.isfinite(reward[row])]
        third = min(count // 3, len(order) // 2)
        rows |= dict.fromkeys(order[::-1][:third], "best") | dict.fromkeys(order[:third], "worst")
    others = [row for row in permutation(num_rows, "report", seed).tolist() if row not in rows]
    return rows | dict.fromkeys(others[: count - len(rows)], "any")


def _sample(
    samples: Samples, row: int, why: str, numbers: Sequence[str], heat: Sequence[str], texts: TokenTexts
) -> dict[str, Any]:
    response = samples.response(row)
    length = response.stop - response.start
    kept = slice(response.start, min(response.stop, response.start + MAX_TOKENS))
    pieces = texts.pieces(samples.token("token_ids")[kept].tolist())
    prompt = str(samples.sample("prompt_text")[row]) if "prompt_text" in samples.known else ""
    cut = [f"{length - MAX_TOKENS} more tokens"] if length > MAX_TOKENS else []
    cut += [f"{len(prompt) - MAX_CHARACTERS} more characters of the prompt"] if len(prompt) > MAX_CHARACTERS else []
    return {
        "iteration": samples.iteration,
        "row": row,
        "why": why,
        "values": {name: jsonable(samples.sample(name)[row]) for name in numbers},
        "prompt": prompt[:MAX_CHARACTERS],
        "text": _response(samples, row, pieces),
        "tokens": pieces,
        "columns": {name: _rounded(samples.token(name)[kept]) for name in heat},
        "cut": ", ".join(cut),
    }


def _response(samples: Samples, row: int, pieces: Sequence[str]) -> str:
    text = str(samples.sample("text")[row]) if "text" in samples.known else "".join(pieces)
    return text[: MAX_TOKENS * 8]


def _rounded(values: Array) -> list[float | None]:
    """Four digits, since a colour needs no more; None for what is not finite, as JSON has no such number."""
    exact = values.astype(np.float64)
    finite = np.isfinite(exact)
    sizes = np.abs(np.where(finite & (exact != 0), exact, 1.0))
    digits = (3 - np.floor(np.log10(sizes))).astype(int)
    # Dividing by a power of ten gives the number that is written shortest; multiplying by its inverse does not.
    power = 10.0 ** np.abs(digits)
    rounded = np.where(digits >= 0, np.round(exact * power) / power, np.round(exact / power) * power)
    return [value if known else None for value, known in zip(rounded.tolist(), finite.tolist(), strict=True)]


def _scales(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The magnitude of each column that gets the full colour: the 98th percentile over all samples."""
    scales = {}
    for name in HEAT_COLUMNS:
        values = [v for sample in samples for v in sample["columns"].get(name, ()) if v is not None]
        if values:
            magnitudes = np.abs(np.array(values))
            scales[name] = float(np.quantile(magnitudes, 0.98)) or float(magnitudes.max())
    return scales


__all__ = ["collect", "pick", "spread"]


def default_path(run: RunDirectory) -> Location:
    """Where a report goes unless told otherwise."""
    return run.path / "report.html"
