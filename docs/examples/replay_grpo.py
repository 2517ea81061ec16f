"""Off-policy GRPO with a replay buffer, after OP-GRPO (Zhang et al. 2026, arXiv 2604.04142), for text.

An iteration makes two updates: one on fresh groups, one on groups of earlier iterations. The buffer is the run's
rollout store; `informative` picks the groups whose rewards differ most. The paper's sequence-level correction,

    w(y) = min(CAP, product over the response of pi_old / pi_behaviour),

weighs each replayed sequence. It stands outside the clip: pi_old is the policy just before this update, so that the
clipped ratio still starts at 1. pi_behaviour is what sampled the tokens (`rollout_log_probs`). The paper's models
make images by flow matching, and it also cuts trajectories short at late denoising steps, which text has none of.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from configs.schema import RunConfig
from pipeline.losses import LossBatch, LossOutput, ModelOutputs, get_loss
from pipeline.models import Models, gather
from pipeline.replay import ReplayGroups
from pipeline.stages import Prompts, RolloutsHandle

CAP = 2.0


async def replay_grpo(models: Models, prompts: Prompts) -> RolloutsHandle:
    rollouts = await models.actor.generate_sequences(prompts)
    await gather(models.actor.compute_log_prob(rollouts), models.reward.compute_reward(rollouts))
    await models.compute_advantages(rollouts, estimator="group")
    await models.actor.update_actor(rollouts, loss="clipped")
    replayed = await models.replay(prompts, last=4, groups=2, select="replay_grpo.py:informative")
    await models.actor.compute_log_prob(replayed)
    await models.compute_advantages(replayed, estimator="group")
    await models.actor.update_actor(replayed, loss="replay_grpo.py:corrected")
    return rollouts


def informative(groups: ReplayGroups, count: int, seed: int) -> Sequence[int]:
    """Those of largest variance, none without; the newest of several that are alike."""
    order = np.lexsort((groups.age, -groups.variance))
    return [int(number) for number in order[:count] if groups.variance[number] > 0]


def corrected(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    clipped = get_loss("clipped")(outputs, batch, config)
    drift = torch.where(batch.mask, batch["log_probs"] - batch["rollout_log_probs"], 0.0)
    of_row = drift.new_zeros(batch.num_rows).index_add(0, batch.sequence_ids, drift)
    weight = of_row.clamp(max=math.log(CAP)).exp()[batch.sequence_ids]
    metrics = {**clipped.metrics, "replay_weight": torch.where(batch.mask, weight, 0.0)}
    return LossOutput(loss=clipped.loss * weight, metrics=metrics)
