"""Files of the machine that a configuration names, by key: each host of a cluster has to have them."""

from __future__ import annotations

from collections.abc import Iterator

from configs.checkpoint_paths import CHECKPOINT, parse_checkpoint
from configs.evaluation import held_out, held_out_key
from configs.model_files import GGUF
from configs.path_checks import looks_local, models_of
from configs.schema import RunConfig


def local_files(config: RunConfig) -> dict[str, str]:
    """Models, data and code that are files or folders; hub ids, names and modules are not among them."""
    return {key: path for key, path in _named(config) if looks_local(path)}


def _named(config: RunConfig) -> Iterator[tuple[str, str]]:
    for role, model in models_of(config).items():
        if model.path is not None:
            yield f"{role}.path", _model(model.path)
    if config.tokenizer is not None:
        yield "tokenizer", _model(config.tokenizer)
    data = {"data.train": config.data.train, "data.pretraining": config.data.pretraining}
    data |= {held_out_key(name): dataset for name, dataset in held_out(config).items()}
    for key, dataset in data.items():
        if dataset is not None and dataset.source != "reasoning_gym":
            yield f"{key}.path", dataset.path
    yield from _code(config)


def _code(config: RunConfig) -> Iterator[tuple[str, str]]:
    named = {f"plugins.{index}": name for index, name in enumerate(config.plugins)}
    named["algorithm"] = config.algorithm
    named |= {"advantage.estimator": config.advantage.estimator or "", "loss.policy": config.loss.policy or ""}
    named["data.sampler"] = config.data.sampler or ""
    if config.rollout.environment is not None:
        named["rollout.environment"] = config.rollout.environment.path
    for section, functions in (("rewards", config.rewards.functions), ("costs", config.costs.functions)):
        named |= {f"{section}.functions.{index}": function.path for index, function in enumerate(functions)}
    for key, name in named.items():
        file = name if name.endswith(".py") else name.rpartition(":")[0]
        if file.endswith(".py"):
            yield key, file if looks_local(file) else f"./{file}"


def _model(path: str) -> str:
    if path.startswith(CHECKPOINT):
        return parse_checkpoint(path).run
    return path.removeprefix(GGUF)
