"""RLHF algorithms as short functions over models (the paper's Figures 1 and 6).

An algorithm is written once, runs over any placement, and is traced for its dataflow graph
(`pipeline.trace`). Register one with `ALGORITHMS.register`, or name it `module:function` or
`path/to/file.py:function` in the configuration.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from configs.algorithms import WITHOUT_CRITIC
from pipeline.models import Models, gather
from pipeline.registry import Registry
from pipeline.stages import Prompts, RolloutsHandle

AlgorithmFunction = Callable[[Models, Prompts], Awaitable[RolloutsHandle]]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A registered algorithm: its function and the batch that an iteration takes from the data."""

    name: str
    function: AlgorithmFunction


ALGORITHMS: Registry[AlgorithmFunction] = Registry("algorithm")


def get_algorithm(name: str) -> Algorithm:
    """The algorithm registered as `name`, or imported from `module:function`."""
    return Algorithm(name=name, function=ALGORITHMS.get(name))


@ALGORITHMS.register("ppo")
async def ppo(models: Models, prompts: Prompts) -> RolloutsHandle:
    """PPO (Schulman et al. 2017) with generalised advantage estimation; the paper's Figure 1."""
    rollouts = await models.actor.generate_sequences(prompts)
    await gather(models.critic.compute_values(rollouts),
                 models.actor.compute_log_prob(rollouts),
                 models.reference.compute_log_prob(rollouts),
                 models.reward.compute_reward(rollouts))  # fmt: skip
    await models.compute_advantages(rollouts, estimator="gae")
    await gather(models.critic.update_critic(rollouts), models.actor.update_actor(rollouts, loss="clipped"))
    return rollouts


@ALGORITHMS.register("remax")
async def remax(models: Models, prompts: Prompts) -> RolloutsHandle:
    """ReMax (Li et al. 2024, arXiv 2310.10505): the reward of the greedy response is the baseline; no critic.

    The paper's Figure 6: PPO with one more generation and without the critic's lines.
    """
    rollouts = await models.actor.generate_sequences(prompts)
    greedy = await models.actor.generate_sequences(prompts, do_sample=False)
    await gather(models.actor.compute_log_prob(rollouts),
                 models.reference.compute_log_prob(rollouts),
                 models.reward.compute_reward(rollouts),
                 models.reward.compute_reward(greedy))  # fmt: skip
    await models.compute_advantages(rollouts, estimator="remax", baseline=greedy)
    await models.actor.update_actor(rollouts, loss="clipped")
    return rollouts


@ALGORITHMS.register("safe_rlhf")
async def safe_rlhf(models: Models, prompts: Prompts) -> RolloutsHandle:
    """Safe-RLHF (Dai et al. 2023, arXiv 2310.12773): PPO under a limit on the mean cost; the paper's Figure 6.

    Beside PPO: costs, their critic, and the pretraining loss; the multiplier is `pipeline.cost_multiplier`.
    """
    rollouts = await models.actor.generate_sequences(prompts)
    pretraining = await models.actor.load_pretraining(prompts)
    await gather(models.critic.compute_values(rollouts),
                 models.cost_critic.compute_values(rollouts),
                 models.actor.compute_log_prob(rollouts),
                 models.reference.compute_log_prob(rollouts),
                 models.reward.compute_reward(rollouts),
                 models.cost.compute_cost(rollouts))  # fmt: skip
    await models.compute_advantages(rollouts, estimator="safe_gae")
    await gather(models.critic.update_critic(rollouts),
                 models.cost_critic.update_critic(rollouts),
                 models.actor.update_actor(rollouts, loss="clipped", pretraining=pretraining))  # fmt: skip
    return rollouts


async def without_critic(models: Models, prompts: Prompts) -> RolloutsHandle:
    """The algorithms whose baseline is the samples' own: estimator, loss and normaliser are configuration.

    `configs.algorithms` says what each name sets, and where it comes from.
    """
    rollouts = await models.actor.generate_sequences(prompts)
    await gather(models.actor.compute_log_prob(rollouts),
                 models.reference.compute_log_prob(rollouts),
                 models.reward.compute_reward(rollouts))  # fmt: skip
    await models.compute_advantages(rollouts)
    await models.actor.update_actor(rollouts)
    return rollouts


for _name in WITHOUT_CRITIC:
    ALGORITHMS.register(_name)(without_critic)


@ALGORITHMS.register("sft")
async def sft(models: Models, batch: Prompts) -> RolloutsHandle:
    """Supervised fine-tuning: the negative log-likelihood of the responses."""
    sequences = await models.actor.load_sequences(batch)
    return await models.actor.update_actor(sequences, loss="sft")


@ALGORITHMS.register("reward_model")
async def reward_model(models: Models, batch: Prompts) -> RolloutsHandle:
    """Reward model by the Bradley-Terry likelihood of preference pairs (Ouyang et al. 2022)."""
    pairs = await models.reward.load_pairs(batch)
    return await models.reward.update_reward(pairs, loss="bradley_terry")


@ALGORITHMS.register("evaluate")
async def evaluate(models: Models, prompts: Prompts) -> RolloutsHandle:
    """No training: the held-out data sets, once (`hybridflow evaluate`)."""
    return await models.actor.evaluate(prompts, step=0)


@ALGORITHMS.register("dpo")
async def dpo(models: Models, batch: Prompts) -> RolloutsHandle:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290): pairs, no rollouts."""
    pairs = await models.actor.load_pairs(batch)
    await models.reference.compute_log_prob(pairs, always=True)
    return await models.actor.update_actor(pairs, loss="dpo")


@ALGORITHMS.register("cost_model")
async def cost_model(models: Models, batch: Prompts) -> RolloutsHandle:
    """Safe-RLHF's cost model (Dai et al. 2023, arXiv 2310.12773, eq. 6) by safety preferences."""
    pairs = await models.cost.load_pairs(batch)
    return await models.cost.update_cost(pairs, loss="cost_preference")
