"""From prompts to packed rollouts, through the rank's engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipeline.balance import partition_by_tokens
from pipeline.random import seed_of
from pipeline.rollouts import Array, Rollouts, offsets_of
from workers.data_source import Prompt
from workers.engines.base import GenerateRequest, GenerateResult, SamplingParams
from workers.memory import give_back
from workers.rank_context import RankContext
from workers.residency import FORWARD_PARTS

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

    `transition_seconds`: from the end of what ran before to the moment at which the engines take requests.
    """
    started = time.perf_counter()
    engines = context.engines
    starting = not engines.started and context.config.rollout.engine == "sglang"
    if starting:
        _make_room(context)  # an engine takes a share of what is free when it starts
    elif context.config.rollout.engine == "torch":
        context.residency.ensure("actor", parts=FORWARD_PARTS)  # weights are gathered on the device
    metrics = engines.sync()
    if not starting:
        _make_room(context)
    engines.wake()
    return metrics if starting else {**metrics, "transition_seconds": time.perf_counter() - started}


def _make_room(context: RankContext) -> None:
    context.residency.release_all()
    give_back(context.device)


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
    """This rank's prompts, `samples_per_prompt` responses each.

    A sample's randomness is a function of (run seed, iteration, prompt, occurrence, sample): no
    generator's state is saved, and the number of ranks does not matter.
    """
    temperature = request.arguments.get("temperature")
    num_samples = samples_per_prompt(context, request)
    requests = [
        GenerateRequest(
            request_id=str(group),
            prompt_tokens=list(prompt.tokens),
            seeds=tuple(
                seed_of(
                    context.config.seed,
                    "sample",
                    request.key.iteration,
                    request.key.stage,
                    prompt.row,
                    sample,
                )
                for sample in range(num_samples)
            ),
        )
        for prompt, group in zip(prompts, groups, strict=True)
    ]
    started = time.perf_counter()
    results = context.engines.generate(requests, sampling_params(context, temperature=temperature))
    seconds = time.perf_counter() - started
    rollouts = pack_results(prompts, groups, results, decode=context.decode)
    return rollouts, {"generation_seconds": seconds}


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
    rows = [(p, g, k, s) for p, g, r in zip(prompts, groups, results, strict=True) for k, s in enumerate(r.samples)]
    token_ids = [np.array([*p.tokens, *s.token_ids], dtype=np.int32) for p, _, _, s in rows]
    prompt_lengths = np.array([len(p.tokens) for p, _, _, _ in rows], dtype=np.int32)
    response_lengths = np.array([len(s.token_ids) for _, _, _, s in rows], dtype=np.int32)

    def spread(values: Sequence[Array], dtype: str, fill: float) -> Array:
        parts = [np.concatenate([np.full(n, fill), v]) for n, v in zip(prompt_lengths, values, strict=True)]
        return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)

    def text(values: Sequence[str]) -> Array:
        return np.array(values, dtype=object)

    return Rollouts(
        offsets=offsets_of(prompt_lengths + response_lengths),
        token_columns={
            "token_ids": np.concatenate(token_ids) if token_ids else np.zeros(0, np.int32),
            "response_mask": spread([np.ones(n) for n in response_lengths], "uint8", 0),
            "rollout_log_probs": spread([s.log_probs for _, _, _, s in rows], "float32", 0.0),
            "policy_version": spread([s.policy_version for _, _, _, s in rows], "int32", -1),
        },
        sample_columns={
            "prompt_id": np.array([p.row for p, _, _, _ in rows], dtype=np.int64),
            "group": np.array([g for _, g, _, _ in rows], dtype=np.int32),
            "sample": np.array([k for _, _, k, _ in rows], dtype=np.int32),
            "prompt_length": prompt_lengths,
            "response_length": response_lengths,
            "finish_reason": text([s.finish_reason for _, _, _, s in rows]),
            "prompt_text": text([p.text for p, _, _, _ in rows]),
            "text": text([decode(s.token_ids) for _, _, _, s in rows]),
            "answer": text([p.answer or "" for p, _, _, _ in rows]),
        },
    )
