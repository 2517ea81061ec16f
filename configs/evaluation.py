"""The held-out data sets of a configuration, and what an evaluation of them cannot mean."""

from __future__ import annotations

from collections.abc import Iterator

from configs.errors import shown, suggestion
from configs.over_long import over_long_buffer
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


def without_held_out(config: RunConfig, name: str) -> str:
    """How to do without a data set, for messages."""
    if name != VALIDATION:
        return f"take {name} out of evaluation.datasets"
    needed = config.evaluation.every is not None and len(held_out(config)) == 1
    return "--set data.validation=null" + (" --set evaluation.every=null" if needed else "")


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
    own = {
        "model": has_model,
        "environment": config.rollout.environment is not None,
        "over_long": over_long_buffer(config) is not None,
    }
    return (*functions, *(name for name, present in own.items() if present))


def evaluation_problems(config: RunConfig) -> Iterator[str]:
    """Data sets, numbers of samples, the judged part."""
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
