"""A whole algorithm in one file: RLOO (Ahmadian et al. 2024, arXiv 2402.14740), written out.

An advantage estimator, a policy loss, and the function that says which model does what in an iteration. Change any
of the three; `hybridflow run own_algorithm.yaml --dry-run` prints the calls that come of it.
"""

import numpy as np
import torch

from configs.schema import RunConfig
from pipeline.advantages import Estimate, ResponseTokens
from pipeline.losses import LossBatch, LossOutput, ModelOutputs
from pipeline.models import Models, gather
from pipeline.rollouts import sequence_ids
from pipeline.stages import Prompts, RolloutsHandle


async def rloo(models: Models, prompts: Prompts) -> RolloutsHandle:
    """Runs on the controller and sees handles, not arrays."""
    rollouts = await models.actor.generate_sequences(prompts)
    await gather(models.actor.compute_log_prob(rollouts), models.reward.compute_reward(rollouts))
    await models.compute_advantages(rollouts, estimator="own_algorithm.py:leave_one_out")
    await models.actor.update_actor(rollouts, loss="own_algorithm.py:reinforce")
    return rollouts


def leave_one_out(tokens: ResponseTokens, config: RunConfig) -> Estimate:
    """Each sample's reward less the mean of the others of its prompt; a number for every response token."""
    rewards = tokens.sequence_rewards()
    _, group = np.unique(tokens.rollouts["group"], return_inverse=True)
    size, total = np.bincount(group)[group], np.bincount(group, weights=rewards)[group]
    advantages = rewards - (total - rewards) / np.maximum(size - 1, 1)
    rows = sequence_ids(tokens.offsets)
    return Estimate(advantages=advantages[rows], returns=rewards[rows])


def reinforce(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    """A loss for every token, 0 on masked ones; the framework weighs and sums."""
    loss = torch.where(batch.mask, -batch["advantages"] * outputs.log_probs, 0.0)
    return LossOutput(loss=loss, metrics={"policy_loss": loss.detach()})
