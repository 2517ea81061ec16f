"""What an algorithm is written against: the models of a run, whose calls return awaitables."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from configs.algorithms import own_estimator, own_policy_loss
from configs.errors import UserError
from configs.evaluation import held_out
from configs.schema import RunConfig
from pipeline.calls import CALLS, ModelCall
from pipeline.placement import reward_is_apart
from pipeline.stages import ColumnsRef, Prompts, RolloutsHandle, StageKey, StageOutcome, StageSpec

Execute = Callable[[StageSpec], Coroutine[Any, Any, StageOutcome]]
T = TypeVar("T")


class Models:
    """The models of one iteration.

    Every call takes its place in the iteration's order when it is made, not when it runs, and is
    handed to `execute`: the flow's tasks, the tracer, or a test.
    """

    def __init__(self, *, run: str, iteration: int, config: RunConfig, execute: Execute) -> None:
        self.run, self.iteration, self.config = run, iteration, config
        self._execute = execute
        self._place = 0
        self._occurrences: Counter[str] = Counter()
        self._row_sets: Counter[str] = Counter()
        self.stages: list[asyncio.Task[RolloutsHandle]] = []
        self.actor = Actor(self)
        self.critic = Critic(self)
        self.reference = Reference(self)
        self.reward = Reward(self)
        self.cost = Cost(self)
        self.cost_critic = CostCritic(self)

    def call(
        self, site: str, rollouts: RolloutsHandle, *, row_set: str = "", **arguments: Any
    ) -> asyncio.Task[RolloutsHandle]:
        """Issue the call registered as `site`; the result is the handle with the new columns.

        row_set: name of the rows that a call with `new_rows` makes; empty: those that are trained on. The arguments
        of the table's `also_reads` are handles of further row sets, or lists of them; None, or one without columns, is
        left out.
        Raises KeyError when no such call is registered.
        """
        if site not in CALLS:
            raise KeyError(f"no call {site!r} is registered (pipeline/calls.py lists them)")
        call = CALLS[site]
        others = further_rows(call, arguments)
        key = self.new_key(site)
        self._place += 1
        target = RolloutsHandle(self.iteration, self._new_row_set(row_set)) if call.new_rows else rollouts
        spec = StageSpec(
            key=key,
            call=call,
            place=self._place,
            rollouts=rollouts.ref(),
            arguments=arguments,
            row_set=target.row_set,
            others=others,
        )
        task = asyncio.ensure_future(self._run(spec, target))
        task.set_name(key.name)
        self.stages.append(task)
        return task

    def new_key(self, site: str) -> StageKey:
        """The name of the next call at this site; it is taken."""
        key = StageKey(run=self.run, iteration=self.iteration, site=site, occurrence=self._occurrences[site])
        self._occurrences[site] += 1
        return key

    def _new_row_set(self, name: str) -> str:
        """The name, with a number where the iteration has such rows already."""
        number = self._row_sets[name]
        self._row_sets[name] += 1
        return name if number == 0 else f"{name or 'rows'}{number}"

    async def _run(self, spec: StageSpec, target: RolloutsHandle) -> RolloutsHandle:
        target.add(await self._execute(spec))
        return target

    def replay(
        self, prompts: Prompts, *, last: int, groups: int, select: str = "uniform"
    ) -> asyncio.Task[RolloutsHandle]:
        """Rows of earlier iterations as a row set of this one (`replay`), with their rewards and what sampled them.

        last: iterations to choose from. groups: at most so many prompts' samples; none before there are any.
        select: a registered selection (uniform, newest) or an import path (`pipeline.replay.Selection`).
        """
        return self.call("actor.replay_sequences", prompts, row_set="replay", last=last, groups=groups, select=select)

    async def compute_advantages(
        self, rollouts: RolloutsHandle, *, estimator: str | None = None, baseline: RolloutsHandle | None = None
    ) -> RolloutsHandle:
        """Numeric, no forward pass (Table 4); runs on one rank of the actor's pool, beside the columns.

        estimator: None: that of the configuration, which goes before it anyway, or of the algorithm's entry.
        baseline: rows with a reward, one for each prompt, whose rewards are the baseline (ReMax).
        """
        chosen = self.config.advantage.estimator or estimator or own_estimator(self.config.algorithm)
        site = "actor.compute_safe_advantages" if "cost" in rollouts.columns else "actor.compute_advantages"
        return await self.call(site, rollouts, estimator=chosen, baseline=baseline)


def further_rows(call: ModelCall, arguments: dict[str, Any]) -> dict[str, ColumnsRef]:
    """The handles among the arguments, which are taken out of them; those of a list by number: `rounds.0`."""
    found: dict[str, ColumnsRef] = {}
    for name in call.also_reads:
        given = arguments.pop(name, None)
        named = {f"{name}.{i}": h for i, h in enumerate(given)} if isinstance(given, list) else {name: given}
        found |= {key: handle.ref() for key, handle in named.items() if handle is not None and handle.columns}
    return found


class _Role:
    def __init__(self, models: Models) -> None:
        self._models = models


class Actor(_Role):
    """The policy."""

    def generate_sequences(
        self, prompts: Prompts, *, do_sample: bool = True, **sampling: Any
    ) -> Awaitable[RolloutsHandle]:
        """Auto-regressive generation; `num_samples` responses for every prompt.

        do_sample: False: one greedy response for every prompt, in the row set `greedy`.
        """
        if not do_sample:
            sampling = {"row_set": "greedy", "temperature": 0.0, "num_samples": 1, **sampling}
        config = self._models.config
        if config.rollout.dynamic_sampling is not None and reward_is_apart(config) and not sampling.get("row_set"):
            return draw_rounds(self._models, prompts, config.rollout.dynamic_sampling.max_rounds, sampling)
        return self._models.call("actor.generate_sequences", prompts, **sampling)

    def load_sequences(self, batch: Prompts) -> Awaitable[RolloutsHandle]:
        """Rows of the data set as sequences (supervised fine-tuning)."""
        return self._models.call("actor.load_sequences", batch)

    def compute_log_prob(self, rollouts: RolloutsHandle) -> Awaitable[RolloutsHandle]:
        """One forward pass: the log-probabilities that the losses call old.

        With `rollout.recompute_log_probs: false` the engine's stand in for them and nothing runs.
        """
        if not self._models.config.rollout.recompute_log_probs:
            return _ready(rollouts)
        return self._models.call("actor.compute_log_prob", rollouts)

    def load_pairs(self, batch: Prompts) -> Awaitable[RolloutsHandle]:
        """Preference pairs (DPO): rows 2i (chosen) and 2i + 1 (rejected)."""
        return self._models.call("actor.load_pairs", batch)

    async def evaluate_pairs(self, batch: Prompts) -> RolloutsHandle:
        """DPO on the held-out pairs, which are a row set `validation` with log-probabilities of the reference."""
        pairs = await self._models.call("actor.load_pairs", batch, row_set="validation", split="validation")
        await self._models.reference.compute_log_prob(pairs, always=True)
        return await self._models.call("actor.evaluate_pairs", pairs)

    def load_pretraining(self, batch: Prompts) -> Awaitable[RolloutsHandle]:
        """Texts for the pretraining loss, in the row set `pretraining`; without data.pretraining none."""
        if self._models.config.data.pretraining is None:
            return _ready(RolloutsHandle(batch.iteration, "pretraining"))
        return self._models.call("actor.load_pretraining", batch, row_set="pretraining")

    def update_actor(
        self, rollouts: RolloutsHandle, *, loss: str | None = None, pretraining: RolloutsHandle | None = None
    ) -> Awaitable[RolloutsHandle]:
        """Forward, backward and optimizer steps over the rollouts.

        pretraining: texts whose loss, times loss.pretraining_coef, is added to each step's (Table 4's compute_loss).
        loss: None: that of the configuration, which goes before it anyway, or of the algorithm's entry.
        """
        config = self._models.config
        chosen = config.loss.policy or loss or own_policy_loss(config.algorithm)
        if chosen is None:
            raise UserError(f"algorithm {config.algorithm!r} names no policy loss; set loss.policy, as in clipped")
        return self._models.call("actor.update_actor", rollouts, loss=chosen, pretraining=pretraining)

    async def evaluate(self, prompts: Prompts, *, step: int) -> RolloutsHandle:
        """Responses to every held-out data set, scored as in training; step: updates so far, for the record.

        One call where engines and reward share ranks, or the reward is functions only. A reward model that is
        elsewhere scores rows that travel: a row set of its own, `held_out_NAME`.
        """
        models, evaluation = self._models, self._models.config.evaluation
        sampling: dict[str, Any] = {"temperature": evaluation.temperature, "num_samples": evaluation.num_samples}
        apart = reward_is_apart(models.config)
        for name in held_out(models.config):
            if not apart:
                await models.call("actor.evaluate", prompts, dataset=name, step=step, **sampling)
                continue
            rows = f"held_out_{name}"
            samples = await models.call("actor.generate_held_out", prompts, row_set=rows, dataset=name, **sampling)
            await models.call("reward.score_held_out", samples, dataset=name)
            await models.call("actor.estimate_held_out", samples, dataset=name, step=step)
        return prompts


class Critic(_Role):
    """The value model."""

    def compute_values(self, rollouts: RolloutsHandle) -> Awaitable[RolloutsHandle]:
        """One forward pass: the value before every response token."""
        return self._models.call("critic.compute_values", rollouts)

    def update_critic(self, rollouts: RolloutsHandle) -> Awaitable[RolloutsHandle]:
        """Squared error on the returns."""
        return self._models.call("critic.update_critic", rollouts, loss="value")


class CostCritic(_Role):
    """The value model of the costs (Safe-RLHF); nothing runs with safety.cost_critic: false."""

    def compute_values(self, rollouts: RolloutsHandle) -> Awaitable[RolloutsHandle]:
        """One forward pass: the costs to come, before every response token."""
        if not self._models.config.safety.cost_critic:
            return _ready(rollouts)
        return self._models.call("cost_critic.compute_values", rollouts)

    def update_critic(self, rollouts: RolloutsHandle) -> Awaitable[RolloutsHandle]:
        """Squared error on the costs' returns."""
        if not self._models.config.safety.cost_critic:
            return _ready(rollouts)
        return self._models.call("cost_critic.update_critic", rollouts, loss="value")


class Cost(_Role):
    """The cost model, cost functions, or both (Safe-RLHF)."""

    def load_pairs(self, batch: Prompts) -> Awaitable[RolloutsHandle]:
        """Safety preferences: rows 2i (safer) and 2i + 1 (more harmful), labelled."""
        return self._models.call("cost.load_pairs", batch)

    def update_cost(self, pairs: RolloutsHandle, *, loss: str) -> Awaitable[RolloutsHandle]:
        """Forward, backward and optimizer steps over the pairs."""
        return self._models.call("cost.update_cost", pairs, loss=loss)

    def compute_cost(self, rollouts: RolloutsHandle) -> Awaitable[RolloutsHandle]:
        """One cost per sequence, and its parts."""
        return self._models.call("cost.compute_cost", rollouts)


class Reference(_Role):
    """The frozen policy."""

    def compute_log_prob(self, rollouts: RolloutsHandle, *, always: bool = False) -> Awaitable[RolloutsHandle]:
        """One forward pass; nothing runs where no KL term needs it, unless `always`."""
        if self._models.config.kl.placement == "none" and not always:
            return _ready(rollouts)
        return self._models.call("reference.compute_log_prob", rollouts)


class Reward(_Role):
    """The reward model, reward functions, or both."""

    def load_pairs(self, batch: Prompts) -> Awaitable[RolloutsHandle]:
        """Preference pairs: rows 2i (chosen) and 2i + 1 (rejected)."""
        return self._models.call("reward.load_pairs", batch)

    def compute_reward(self, rollouts: RolloutsHandle) -> Awaitable[RolloutsHandle]:
        """One score per sequence, and its parts; nothing runs where generation has scored already
        (`rollout.dynamic_sampling`)."""
        if "reward" in rollouts.columns:
            return _ready(rollouts)
        return self._models.call("reward.compute_reward", rollouts)

    def update_reward(self, pairs: RolloutsHandle, *, loss: str) -> Awaitable[RolloutsHandle]:
        """Forward, backward and optimizer steps over the pairs."""
        return self._models.call("reward.update_reward", pairs, loss=loss)


async def draw_rounds(models: Models, prompts: Prompts, max_rounds: int, sampling: dict[str, Any]) -> RolloutsHandle:
    """Dynamic sampling whose reward model is in another pool: stages for each round, of which the last joins them.

    A round of no rows says that nothing is missing, or that there are no further prompts.
    """
    seeded_as = models.new_key("actor.generate_sequences").stage
    rounds: list[RolloutsHandle] = []
    for _ in range(max_rounds + 1):
        drawn = await models.call(
            "actor.generate_round", prompts, row_set="round", rounds=rounds, seeded_as=seeded_as, **sampling
        )
        if not drawn.num_rows:
            break
        rounds.append(await models.call("reward.score_round", drawn))
    totals: Counter[str] = Counter()
    for drawn in rounds:
        totals.update({name.removeprefix(f"{drawn.row_set}/"): value for name, value in drawn.metrics.items()})
    return await models.call("actor.join_rounds", prompts, rounds=rounds, totals=dict(totals))


async def _ready(rollouts: RolloutsHandle) -> RolloutsHandle:
    return rollouts


async def gather(*calls: Awaitable[T]) -> list[T]:
    """All results, in order. When one fails the others are still waited for, so that no call of a
    failed iteration is left running on the ranks; then the first error is raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
