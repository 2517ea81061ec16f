"""What a configuration cannot mean, found in a fraction of a second and before anything is loaded.

Each check yields lines `key: value: problem; remedy`. Only combinations that cannot work are refused,
not unusual ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from configs.algorithms import TRAINED_SCORER, WITHOUT_CRITIC, algorithm_names
from configs.blame import Stated
from configs.cluster_checks import cluster_problems
from configs.data_files import Kind, batch_warnings, data_problems
from configs.data_sources import source_problems
from configs.deployment_checks import checkpoint_problems, deployment_problems
from configs.engine_checks import effect_warnings, engine_argument_problems, tensor_parallel_problems
from configs.errors import refuse, shown, suggestion
from configs.evaluation import (
    evaluation_problems,
    held_out,
    held_out_key,
    with_held_out,
    without_held_out,
)
from configs.hub_checks import hub_problems, hub_warnings
from configs.init_checks import init_problems
from configs.loader import presets
from configs.machine_checks import machine_problems, machine_warnings
from configs.model_checks import model_file_problems
from configs.objective_checks import ESTIMATORS, POLICY_LOSSES, objective_problems
from configs.over_long import over_long_buffer
from configs.part_names import reward_name_problems
from configs.path_checks import code_problems, model_problems, output_problems, package_problems
from configs.paths import is_there, user_path
from configs.plugin_checks import plugin_problems, registered_names
from configs.pool_checks import DEFAULT_POOL, pool_problems
from configs.safety_checks import safety_problems
from configs.schema import ROLES, ModelConfig, RunConfig
from configs.secrets import secret_problems
from configs.tokenizer_checks import tokenizer_problems

EVALUATE = "evaluate"
"""The algorithm that the command of that name sets."""
ALGORITHMS = tuple(name for name in algorithm_names() if name != EVALUATE)
RL_ALGORITHMS = ("ppo", "remax", "safe_rlhf", *WITHOUT_CRITIC)
BUILT_IN_REWARDS = (
    "exact_match", "contains", "regex", "length", "reasoning_gym", "math_verify", "json_schema", "code", "http_judge",
)  # fmt: skip
WANT_ANSWERS = {"exact_match": "", "math_verify": "", "code": "", "contains": "text", "json_schema": "schema"}
"""Built-in rewards that compare with the answer, but for those that an option (its name) relieves of it."""
QUICKSTART_DATA = "quickstart/data/"
"""Where the quickstart's presets say that their data is."""
MAX_NAME = 100

Check = Callable[[RunConfig], Iterator[str]]


def check_config(config: RunConfig, *, source: str = "", stated: Stated | None = None, trains: bool = False) -> None:
    """Raises ConfigError with all problems (`refuse`).

    source: the file that the message names first; empty: none. stated: how the configuration was put together, to
    name the override that a problem came with instead. trains: an algorithm that does not is a problem.
    """
    refuse(_quickstart_by_itself(config, source), source=source)
    check = partial(config_problems, beside=folder_of(source), trains=trains)
    if stated is None:
        refuse(check(config), source=source)
    else:
        refuse(stated.placed(check(config), check, file=source))


def _quickstart_by_itself(config: RunConfig, source: str) -> Iterator[str]:
    """The quickstart's presets name files and runs that only it makes."""
    train = config.data.train
    is_unchanged = train is not None and train.path.startswith(QUICKSTART_DATA) and not is_there(train.path)
    if source.startswith("quickstart_") and source in presets() and is_unchanged:
        yield (
            "is a part of `hybridflow quickstart`, which writes its data and makes its three runs one "
            "after the other; type that"
        )


def config_problems(config: RunConfig, *, beside: Path | None = None, trains: bool = False) -> Iterator[str]:
    """Every problem, one line each; the cheap checks first.

    beside: the folder that the configuration lies in, where it is known. trains: as of `check_config`.
    """
    if trains and config.algorithm == EVALUATE:
        yield (
            f"algorithm: {EVALUATE} trains nothing; use the command hybridflow evaluate, or name an algorithm: "
            f"{', '.join(ALGORITHMS)}"
        )
        return
    for check in CHECKS:
        yield from check(config)
    yield from hub_problems(config, beside=beside)


def config_warnings(config: RunConfig) -> Iterator[str]:
    """What may work, but hardly as it was meant, one line each."""
    yield from machine_warnings(config)
    yield from effect_warnings(config)
    yield from batch_warnings(config.data)
    yield from hub_warnings(config)
    yield from _micro_batch_warnings(config)


def _micro_batch_warnings(config: RunConfig) -> Iterator[str]:
    """A budget that the sequences may not keep."""
    generates = data_kind(config.algorithm) == "prompts"
    key = "rollout.max_new_tokens" if generates else "data.max_response_tokens"
    response = config.rollout.max_new_tokens if generates else config.data.max_response_tokens
    longest, budget = config.data.max_prompt_tokens + response, config.training.max_tokens_per_micro_batch
    if config.algorithm != EVALUATE and budget < longest:
        yield (
            f"training.max_tokens_per_micro_batch: {budget}, but a sequence may have {longest} tokens "
            f"(data.max_prompt_tokens + {key}), and one that is longer than the budget is computed alone, beyond it; "
            f"raise it to {longest}, or lower those"
        )


def folder_of(source: str) -> Path | None:
    """The folder of a configuration's file; None where the source is no file (a preset)."""
    return user_path(source).parent if source and is_there(source) else None


def data_kind(algorithm: str) -> Kind:
    """What an iteration of the algorithm takes from the data."""
    kinds: dict[str, Kind] = {
        "sft": "sequences",
        "reward_model": "pairs",
        "dpo": "pairs",
        "cost_model": "safety_pairs",
    }
    return kinds.get(algorithm, "prompts")


def _names(config: RunConfig) -> Iterator[str]:
    yield from plugin_problems(config)
    own = registered_names(config)
    if config.algorithm != EVALUATE:
        yield from code_problems("algorithm", config.algorithm, (*ALGORITHMS, *own), "algorithm")
    if config.advantage.estimator is not None:
        yield from code_problems("advantage.estimator", config.advantage.estimator, (*ESTIMATORS, *own), "estimator")
    if config.loss.policy is not None:
        yield from code_problems("loss.policy", config.loss.policy, (*POLICY_LOSSES, *own), "policy loss")
    if config.rollout.environment is not None:
        yield from code_problems("rollout.environment.path", config.rollout.environment.path, (), "environment")
    if config.data.sampler is not None:
        yield from code_problems("data.sampler", config.data.sampler, (), "sampler")
    for index, function in enumerate(config.rewards.functions):
        key = f"rewards.functions.{index}.path"
        yield from code_problems(key, function.path, BUILT_IN_REWARDS, "built-in reward")


def _trained_model(config: RunConfig) -> Iterator[str]:
    role = TRAINED_SCORER.get(config.algorithm, "actor")
    model: ModelConfig = getattr(config, role)
    if model.path is None and model.init is None:
        yield (
            f"{role}.path: not set, and {config.algorithm} trains the {role}; "
            "name a model directory or hub id, or give its sizes in init"
        )
    elif model.path is None and config.tokenizer is None:
        yield f"tokenizer: not set, and {role}.init has none of its own; name a tokenizer directory or hub id"


def _rollouts_that_go_are_not_read(config: RunConfig) -> Iterator[str]:
    storage = config.storage
    if storage.keep_rollouts is None:
        if storage.keep_rollouts_every is not None:
            yield "storage.keep_rollouts_every: without storage.keep_rollouts nothing goes; set that too"
        return
    if config.data.sampler is not None:
        yield "storage.keep_rollouts: data.sampler reads the rollouts of all iterations; leave one of them out"
    if config.data.seen_prompts == "last":
        yield "storage.keep_rollouts: data.seen_prompts=last reads the last run's prompts; leave one of them out"


def _data_is_there(config: RunConfig) -> Iterator[str]:
    if config.data.train is None and config.algorithm != EVALUATE:
        yield "data.train: not set; name the rows to train on, as in data.train.path=prompts.jsonl"


def _something_is_rewarded(config: RunConfig) -> Iterator[str]:
    if config.algorithm not in (*RL_ALGORITHMS, EVALUATE):
        return
    has_model = config.reward.path is not None or config.reward.init is not None
    if not has_model and not config.rewards.functions and config.rollout.environment is None:
        yield (
            f"rewards.functions: empty and reward.path not set, so {config.algorithm} has no reward; set one of them"
        )
    yield from reward_name_problems(config)


def _answers(config: RunConfig) -> Iterator[str]:
    """Built-in rewards that compare with an answer need one."""
    if config.algorithm not in (*RL_ALGORITHMS, EVALUATE) or not _lacks_answers(config):
        return
    for index, function in enumerate(config.rewards.functions):
        key = f"rewards.functions.{index}.path"
        if function.path == "reasoning_gym":
            yield (
                f"{key}: reasoning_gym scores generated tasks and data.train is none; "
                "set data.train.source to reasoning_gym"
            )
        elif function.path in WANT_ANSWERS and WANT_ANSWERS[function.path] not in function.options:
            yield (f"{key}: {function.path} compares with an answer and data.answer_column is not set; name the column")


def _lacks_answers(config: RunConfig) -> bool:
    sources = held_out(config).values() if config.algorithm == EVALUATE else filter(None, (config.data.train,))
    generated = any(source.source == "reasoning_gym" for source in sources)
    return config.data.answer_column is None and not generated


def _rollout(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.min_new_tokens > rollout.max_new_tokens:
        yield (
            f"rollout.min_new_tokens: {rollout.min_new_tokens} is more than rollout.max_new_tokens "
            f"{rollout.max_new_tokens}; lower one or raise the other"
        )
    if config.algorithm in RL_ALGORITHMS and rollout.temperature == 0:
        yield (
            f"rollout.temperature: 0 is greedy, and {config.algorithm} learns from sampled responses; "
            "set it above 0 (evaluation.temperature may be 0)"
        )


def _sampling(config: RunConfig) -> Iterator[str]:
    if config.data.sampler is None and config.data.sampler_options:
        yield "data.sampler_options: set, but data.sampler is not; name the function that takes them"
    dynamic = config.rollout.dynamic_sampling
    if dynamic is None:
        return
    if config.rollout.num_samples < 2:
        yield (
            "rollout.dynamic_sampling: a prompt has one sample (rollout.num_samples), whose reward cannot differ "
            "from others; set it to 2 or more"
        )
    if config.algorithm == "remax":
        yield "rollout.dynamic_sampling: remax compares with a greedy response to the same prompts; set it to null"
    has_model = config.reward.path is not None or config.reward.init is not None
    names = [function.name or function.path.rpartition(":")[2] for function in config.rewards.functions]
    known = [*names, *(["model"] if has_model else []), *(["environment"] if config.rollout.environment else [])]
    known += ["over_long"] if over_long_buffer(config) is not None else []
    if dynamic.part is not None and dynamic.part not in known:
        yield (
            f"rollout.dynamic_sampling.part: there is no reward {dynamic.part!r}; "
            f"{suggestion(dynamic.part, known, noun='reward')}"
        )


def _safety(config: RunConfig) -> Iterator[str]:
    yield from safety_problems(config, BUILT_IN_REWARDS)
    if (
        config.advantage.estimator == "safe_gae"
        and config.algorithm in RL_ALGORITHMS
        and config.algorithm != "safe_rlhf"
    ):
        yield f"advantage.estimator: safe_gae needs costs, which {config.algorithm} has not; use algorithm safe_rlhf"


def _training(config: RunConfig) -> Iterator[str]:
    training = config.training
    if training.max_staleness > 0:
        yield (f"training.max_staleness: {training.max_staleness} is not offered by runs at present; set it to 0")
    if training.num_mini_batches > config.data.batch_size:
        yield (
            f"training.num_mini_batches: {training.num_mini_batches} is more than data.batch_size "
            f"{config.data.batch_size}, so some would be empty; lower it"
        )


def _optimizers(config: RunConfig) -> Iterator[str]:
    roles = ("actor", "critic", "reward", "cost", "cost_critic")
    models: dict[str, ModelConfig] = {role: getattr(config, role) for role in roles}
    for role, model in models.items():
        if max(model.optimizer.betas) >= 1:
            betas = list(model.optimizer.betas)
            yield f"{role}.optimizer.betas: {betas}: a decay rate has to be below 1; 0.9 and 0.999 are usual"


def _resources(config: RunConfig) -> Iterator[str]:
    resources = config.resources
    total = sum(pool.ranks for pool in resources.pools.values())
    if resources.pools and total != resources.num_ranks:
        yield (
            f"resources.num_ranks: {resources.num_ranks}, but the pools add up to {total}; "
            f"set resources.num_ranks to {total}"
        )
    pools = tuple(resources.pools) or (DEFAULT_POOL,)
    for role, pool in resources.placement.items():
        if pool not in pools:
            yield (
                f"resources.placement.{role}: there is no pool {pool!r} (pools: {', '.join(pools)}); "
                f"name one of them or add it to resources.pools"
            )
    for pool in pools:
        if not pool.isprintable() or len(pool) > MAX_NAME:
            yield f"resources.pools: {shown(pool)} names ranks; use 1 to {MAX_NAME} printable characters"
    for pool in pools[1:]:
        if pool not in resources.placement.values():
            yield f"resources.pools.{pool}: holds no model; place a role in it or remove it"


def _engines_apart(config: RunConfig) -> Iterator[str]:
    """Rollout engines on a pool of their own."""
    resources, rollout = config.resources, config.rollout
    placed = {str(name): pool for name, pool in resources.placement.items()}
    pools = tuple(resources.pools) or (DEFAULT_POOL,)
    own, actor = placed.get("rollout"), placed.get("actor", pools[0])
    if own is None or own == actor or own not in resources.pools:
        return
    others = [role for role in ROLES if placed.get(role, pools[0]) == own]
    if rollout.engine != "sglang":
        yield (
            f"resources.placement.rollout: engines on a pool of their own ({own}) need rollout.engine: sglang; "
            f"it is {rollout.engine}"
        )
    if others:
        yield (
            f"resources.placement.rollout: pool {own!r} also holds {', '.join(others)}; "
            "engines stand beside the actor or alone, so place those elsewhere"
        )


def _data_files(config: RunConfig) -> Iterator[str]:
    kind = data_kind(config.algorithm)
    data = config.data
    for split, dataset in (("train", data.train), ("validation", data.validation), ("pretraining", data.pretraining)):
        if dataset is not None:
            yield from source_problems(f"data.{split}", dataset)
    yield from data_problems(config.data, "train", kind)
    for name in held_out(config):
        without = without_held_out(config, name)
        or_else = f", or name held-out rows with the columns that {config.algorithm} reads, or do without: {without}"
        for problem in data_problems(with_held_out(config, name).data, "validation", kind, or_else=or_else):
            yield problem.replace("data.validation", held_out_key(name), 1)


CHECKS: tuple[Check, ...] = (
    secret_problems,
    _names,
    _trained_model,
    _data_is_there,
    _rollouts_that_go_are_not_read,
    _something_is_rewarded,
    _answers,
    _rollout,
    engine_argument_problems,
    _sampling,
    objective_problems,
    _safety,
    _training,
    _optimizers,
    _resources,
    _engines_apart,
    pool_problems,
    tensor_parallel_problems,
    evaluation_problems,
    checkpoint_problems,
    deployment_problems,
    cluster_problems,
    machine_problems,
    output_problems,
    package_problems,
    model_problems,
    init_problems,
    model_file_problems,
    tokenizer_problems,
    _data_files,
)
