"""From prompts to packed rollouts, through the rank's engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipeline.balance import partition_by_tokens
from pipeline.random import seed_of
from pipeline.rollouts import Array, Rollouts
from workers.data_source import Prompt
from workers.engines.base import GenerateRequest, GenerateResult, SamplingParams
from workers.episodes import SeedParts, play_rollouts
from workers.rank_context import RankContext
from workers.residency import FORWARD_PARTS
from workers.responses import SAMPLE_DTYPES, Response, pack_responses

if TYPE_CHECKING:
    from workers.rank_actor import StageRequest


def sampling_params(context: RankContext, *, temperature: float | None = None) -> SamplingParams:
    """The configuration's sampling parameters, with the stop ids of the model."""
    rollout = context.config.rollout
    return SamplingParams(
        temperature=rollout.temperature if temperature is None else temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
        min_new_tokens=rollout.min_new_tokens,
        stop_token_ids=context.stop_token_ids,
    )


def prepare_engines(context: RankContext) -> dict[str, float]:
    """Engines with the newest weights and their memory (collective); the transition's metrics.

    `transition_seconds`: from the call, which is the stage's beginning, until the engines take requests. Memory that
    the update held goes back from that stage's end on, while the controller is between the two.
    """
    started = time.perf_counter()
    engines, rollout = context.engines, context.config.rollout
    starting = rollout.engine == "sglang" and not engines.started
    if rollout.engine == "torch":
        context.residency.ensure("actor", parts=FORWARD_PARTS)  # weights are gathered on the device
    at_once = rollout.engine == "sglang" and not (context.residency.anything_leaves or rollout.verify_weights)
    if starting or at_once:
        _make_room(context)
    metrics = engines.sync(waking=at_once)
    if not at_once:
        _make_room(context)
    elif engines.colocated:  # ranks that only train need theirs again for the next update
        context.cache_releaser.begin()  # what the transition itself held
    engines.wake()
    return metrics if starting else {**metrics, "transition_seconds": time.perf_counter() - started}


def _make_room(context: RankContext) -> None:
    """For an engine that starts, and takes a share of what is free, all that there is; later for its KV cache.

    While the weights are written this can be done only where they stay on the device, and are not compared, which takes
    memory too.
    """
    engines = context.engines
    if not engines.colocated:
        return
    context.residency.release_all()
    if engines.cache_bytes:
        context.cache_releaser.until_free(engines.cache_bytes + (context.config.rollout.weights_bucket_mib << 20))
    else:
        context.cache_releaser.finish()


def prompts_of_engine(context: RankContext, lengths: Array) -> Array:
    """Prompts of this rank's engine, balanced by tokens; none on a rank that another's engine spans. int64."""
    index = context.engines.engine_index
    if index is None:
        return np.zeros(0, dtype=np.int64)
    return partition_by_tokens(lengths, np.arange(len(lengths)), context.engines.num_engines)[index]


def samples_per_prompt(context: RankContext, request: StageRequest) -> int:
    """What the call asks for, else `rollout.num_samples`."""
    return int(request.arguments.get("num_samples", context.config.rollout.num_samples))


def generate_rollouts(
    context: RankContext, prompts: Sequence[Prompt], groups: Array, request: StageRequest
) -> tuple[Rollouts, dict[str, float]]:
    """This rank's prompts, `samples_per_prompt` responses each (or episodes, with `rollout.environment`); collective.

    A sample's randomness is a function of (run seed, iteration, prompt, occurrence, sample, turn): no
    generator's state is saved, and the number of ranks does not matter.
    """
    config = context.config
    num_samples = samples_per_prompt(context, request)
    sampling = sampling_params(context, temperature=request.arguments.get("temperature"))
    stage = str(request.arguments.get("seeded_as", request.key.stage))
    seeds = [
        [(config.seed, "sample", request.key.iteration, stage, prompt.row, k) for k in range(num_samples)]
        for prompt in prompts
    ]
    started = time.perf_counter()
    if config.rollout.environment is not None:
        rollouts = play_rollouts(context, prompts, groups, seeds, sampling)
    else:
        rollouts = _respond(context, prompts, groups, seeds, sampling)
    return rollouts, {"generation_seconds": time.perf_counter() - started}


def _respond(
    context: RankContext,
    prompts: Sequence[Prompt],
    groups: Array,
    seeds: Sequence[Sequence[SeedParts]],
    sampling: SamplingParams,
) -> Rollouts:
    requests = [
        GenerateRequest(
            request_id=str(group), prompt_tokens=list(prompt.tokens), seeds=tuple(seed_of(*parts) for parts in own)
        )
        for prompt, group, own in zip(prompts, groups, seeds, strict=True)
    ]
    return pack_results(prompts, groups, context.engines.generate(requests, sampling), decode=context.decode)


def pack_results(
    prompts: Sequence[Prompt],
    groups: Array,
    results: Sequence[GenerateResult],
    *,
    decode: Callable[[Array], str],
) -> Rollouts:
    """Packed rollouts of an engine's results, in the prompts' order.

    The mask comes from the lengths that the engine returned, never from token values.
    """
    rows = [
        Response(
            prompt=prompt,
            group=int(group),
            sample=number,
            columns={
                "token_ids": sample.token_ids,
                "response_mask": np.ones(len(sample.token_ids), np.uint8),
                "rollout_log_probs": sample.log_probs,
                "policy_version": sample.policy_version,
            },
            finish_reason=sample.finish_reason,
        )
        for prompt, group, result in zip(prompts, groups, results, strict=True)
        for number, sample in enumerate(result.samples)
    ]
    return pack_responses(rows, decode=decode, dtypes=SAMPLE_DTYPES)
