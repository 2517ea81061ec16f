"""The held-out data sets of a configuration, and what an evaluation of them cannot mean."""

from __future__ import annotations

from collections.abc import Iterator

from configs.errors import shown, suggestion
from configs.schema import DatasetConfig, RunConfig

VALIDATION = "validation"
"""Name of `data.validation` among the data sets."""


def held_out(config: RunConfig) -> dict[str, DatasetConfig]:
    """`data.validation` (as `validation`), where it is set, then `evaluation.datasets`."""
    validation = {} if config.data.validation is None else {VALIDATION: config.data.validation}
    return {**validation, **config.evaluation.datasets}


def with_held_out(config: RunConfig, name: str) -> RunConfig:
    """The configuration with this data set as `data.validation`."""
    data = config.data.model_copy(update={"validation": held_out(config)[name]})
    return config.model_copy(update={"data": data})


def held_out_key(name: str) -> str:
    """The configuration key of a data set, for messages."""
    return "data.validation" if name == VALIDATION else f"evaluation.datasets.{name}"


def metric_prefix(name: str) -> str:
    """What a data set's metrics begin with: `eval/`, or `eval/NAME/`."""
    return "eval/" if name == VALIDATION else f"eval/{name}/"


def scored_parts(config: RunConfig) -> tuple[str, ...]:
    """Names that `evaluation.score` may be, but for the whole reward."""
    functions = [f.path.rpartition(":")[2] if f.name is None else f.name for f in config.rewards.functions]
    has_model = config.reward.path is not None or config.reward.init is not None
    return (*functions, *(("model",) if has_model else ()))


def evaluation_problems(config: RunConfig) -> Iterator[str]:
    """Data sets, numbers of samples, the judged part, and where the reward model is."""
    evaluation = config.evaluation
    if (evaluation.every is not None or config.algorithm == "evaluate") and not held_out(config):
        asks = "algorithm: evaluate" if evaluation.every is None else f"evaluation.every: {evaluation.every}"
        remedy = "name held-out rows there or in evaluation.datasets"
        yield f"{asks}, but data.validation is not set; {remedy}, or set evaluation.every to null"
    for name in evaluation.datasets:
        if not name.isidentifier() or name in (VALIDATION, "reward"):
            yield f"evaluation.datasets: {shown(name)} names metrics; use letters, digits, _, not validation or reward"
    for k in evaluation.ks:
        if k > evaluation.num_samples:
            yield (
                f"evaluation.ks: {k} is more than evaluation.num_samples {evaluation.num_samples}; "
                "lower it or draw more samples"
            )
    parts = scored_parts(config)
    if evaluation.score is not None and evaluation.score not in parts:
        hint = suggestion(evaluation.score, parts)
        yield f"evaluation.score: there is no part {shown(evaluation.score)} of the reward; {hint}"
    if evaluation.every is not None or config.algorithm == "evaluate":
        yield from _reward_model_elsewhere(config)


def _reward_model_elsewhere(config: RunConfig) -> Iterator[str]:
    """Evaluation generates and scores where the engines are."""
    if config.algorithm == "reward_model" or "model" not in scored_parts(config):
        return
    placed = {str(role): pool for role, pool in config.resources.placement.items()}
    first = next(iter(config.resources.pools), "main")
    reward = placed.get("reward", first)
    engines = placed.get("rollout", placed.get("actor", first))
    if engines != reward and config.evaluation.score in (None, "model"):
        yield (
            f"evaluation.score: the reward model is in pool {reward!r} "
            f"and evaluation runs in the engines', {engines!r}; name a reward function, or place the two together"
        )
