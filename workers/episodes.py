"""The rollout loop of several turns, inside the generation stage.

    reset all --> [ actions of all running episodes, generated together --> steps, in processes
                    --> observations as tokens ] until no rank has a running episode

A turn is one call of the engine for all episodes of the rank: what they have read before is in its prefix cache.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from configs.errors import UserError
from configs.schema import EnvironmentConfig
from pipeline.episodes import RESPONSE_DTYPES, Episode, Turn, histories, response_columns
from pipeline.random import seed_of
from pipeline.rollouts import Array, Rollouts
from workers.data_source import Prompt, with_text
from workers.engines.base import GenerateRequest, Sample, SamplingParams
from workers.environments.protocol import Reply
from workers.process_group import any_of_ranks
from workers.responses import Response, pack_responses

if TYPE_CHECKING:
    from workers.rank_context import RankContext

logger = logging.getLogger(__name__)
SeedParts = tuple[int | str, ...]
"""What a sample's randomness is a function of."""

EXTRA_DTYPES = {"num_turns": "int32", "environment_reward": "float32", "environment_dropped": "uint8"}


class EnvironmentFailed(RuntimeError):
    """An environment failed and `rollout.environment.on_error` is abort."""


def play_rollouts(
    context: RankContext,
    prompts: Sequence[Prompt],
    groups: Array,
    seeds: Sequence[Sequence[SeedParts]],
    sampling: SamplingParams,
) -> Rollouts:
    """An episode for each seed of each prompt, as packed rollouts in the prompts' order (collective).

    Raises EnvironmentFailed under `on_error: abort`, UserError for a class that does not fit.
    """
    places = [(p, k) for p, own in enumerate(seeds) for k in range(len(own))]
    play = _Play(context, [prompts[p] for p, _ in places], [seeds[p][k] for p, k in places], sampling)
    play.run()
    dropped = {p for (p, _), episode in zip(places, play.episodes, strict=True) if play.drops(episode)}
    rows = [
        Response(
            prompt=prompt,
            group=int(groups[p]),
            sample=k,
            columns=response_columns(episode),
            finish_reason=str(episode.end),
            extra={
                "num_turns": len(episode.turns),
                "environment_reward": episode.reward,
                "environment_dropped": p in dropped,
            },
        )
        for (p, k), prompt, episode in zip(places, play.prompts, play.episodes, strict=True)
    ]
    return pack_responses(rows, decode=context.decode, dtypes=RESPONSE_DTYPES, extra_dtypes=EXTRA_DTYPES)


class _Play:
    """The episodes of one call. prompts, seeds: one of each for an episode."""

    def __init__(
        self, context: RankContext, prompts: Sequence[Prompt], seeds: Sequence[SeedParts], sampling: SamplingParams
    ) -> None:
        assert context.config.rollout.environment is not None
        self._config: EnvironmentConfig = context.config.rollout.environment
        self._context, self._seeds, self._sampling = context, seeds, sampling
        self._max_tokens = min(self._config.max_total_tokens or context.max_positions, context.max_positions)
        self.prompts = list(prompts)
        self.episodes: list[Episode] = []

    def run(self) -> None:
        """Play to the end. Each turn is one collective call of the engines, also on a rank that has finished."""
        self._reset()
        turn = 0
        while any_of_ranks(any(episode.end is None for episode in self.episodes), self._context.group):
            self._act(turn)
            turn += 1

    def drops(self, episode: Episode) -> bool:
        """Whether its group leaves the iteration."""
        return episode.end == "error" and self._config.on_error == "drop_group"

    def _reset(self) -> None:
        requests = [
            (number, {"reset": number, "row": dict(prompt.data), "seed": seed_of(*parts, "environment")})
            for number, (prompt, parts) in enumerate(zip(self.prompts, self._seeds, strict=True))
        ]
        replies = self._context.environments.ask(requests)
        for number, reply in enumerate(replies):
            prompt = self.prompts[number]
            if reply.observation is not None:
                prompt = with_text(self._context.config.data, self._context.tokenizer, prompt, reply.observation)
                self.prompts[number] = prompt
            state = reply.state or prompt.text
            self.episodes.append(Episode(prompt=prompt.tokens, prompt_row=prompt.row, state=state))
            self._refuse_long(prompt)
            if reply.error:
                self._failed(number, reply)

    def _act(self, turn: int) -> None:
        """One action of every running episode, and what its environment says to it."""
        groups = histories(self.episodes)
        requests = [
            GenerateRequest(
                request_id=request,
                prompt_tokens=list(history),
                seeds=tuple(seed_of(*self._seeds[number], turn) for number in numbers),
            )
            for request, (history, numbers) in enumerate(groups.items())
        ]
        results = self._context.engines.generate(requests, self._sampling)
        sampled: dict[int, Sample] = {}
        for numbers, result in zip(groups.values(), results, strict=True):
            sampled |= dict(zip(numbers, result.samples, strict=True))
        steps = [(number, self._step_request(number, sample)) for number, sample in sorted(sampled.items())]
        replies = self._context.environments.ask(steps)
        for (number, _), reply in zip(steps, replies, strict=True):
            self._take(number, sampled[number], reply)

    def _step_request(self, number: int, sample: Sample) -> dict[str, Any]:
        text = self._context.decode(sample.token_ids)
        return {"step": number, "action": text, "token_ids": sample.token_ids.tolist()}

    def _take(self, number: int, sample: Sample, reply: Reply) -> None:
        """Record an action and its reply, and whether the episode goes on."""
        episode = self.episodes[number]
        turn = Turn(
            token_ids=sample.token_ids,
            log_probs=sample.log_probs,
            policy_version=sample.policy_version,
            state=episode.state,
            reward=reply.reward,
        )
        episode.turns.append(turn)
        if reply.error:
            self._failed(number, reply)
        elif sample.finish_reason == "abort":
            episode.end = "abort"
        elif reply.done:
            episode.end = "done"
        elif len(episode.turns) >= self._config.max_turns:
            episode.end = "max_turns"
        else:
            self._observe(episode, sample, reply)
        if episode.end is not None and not reply.done and not reply.error:
            self._context.environments.forget([number])

    def _observe(self, episode: Episode, sample: Sample, reply: Reply) -> None:
        """Add the observation, unless the next action would not fit behind it."""
        stopped_by = int(sample.token_ids[-1]) if sample.finish_reason == "stop" else None
        observation = self._context.turn_tokens.ids(reply.observation or "", stopped_by=stopped_by)
        if len(episode.token_ids) + len(observation) + self._sampling.max_new_tokens > self._max_tokens:
            episode.end = "length"
            return
        episode.turns[-1] = replace(episode.turns[-1], observation=observation)
        episode.state = reply.state

    def _failed(self, number: int, reply: Reply) -> None:
        """Raises EnvironmentFailed under `on_error: abort`."""
        prompt, turns = self.prompts[number], len(self.episodes[number].turns)
        problem = f"environment {self._config.path} failed on row {prompt.row} of the data, turn {turns}: {reply.error}"
        logger.warning("%s\n%s", problem, reply.traceback)
        if self._config.on_error == "abort":
            raise EnvironmentFailed(problem)
        self.episodes[number].end = "error"

    def _refuse_long(self, prompt: Prompt) -> None:
        needed = len(prompt.tokens) + self._sampling.max_new_tokens
        if needed > self._max_tokens:
            raise UserError(
                f"row {prompt.row + 1}: its prompt and rollout.max_new_tokens are {needed} tokens, an episode "
                f"may have {self._max_tokens}; raise rollout.environment.max_total_tokens or lower the others"
            )
