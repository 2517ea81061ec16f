"""The soft penalty on long responses, as far as the configuration says what it is."""

from __future__ import annotations

from collections.abc import Iterator

from configs.schema import RunConfig


def over_long_buffer(config: RunConfig) -> int | None:
    """Tokens over which the penalty grows; None: there is no penalty.

    A share of the limit needs a limit of the whole response, which episodes of several turns have not.
    """
    over_long = config.rewards.over_long
    if over_long.buffer is not None:
        return over_long.buffer
    if over_long.buffer_share is None or config.rollout.environment is not None:
        return None
    return int(over_long.buffer_share * config.rollout.max_new_tokens) or None


def over_long_problems(config: RunConfig) -> Iterator[str]:
    """A penalty that nothing reaches, or that has no limit to start from."""
    over_long, longest, buffer = config.rewards.over_long, config.rollout.max_new_tokens, over_long_buffer(config)
    if buffer is None:
        if over_long.expected_length is not None:
            yield (
                f"rewards.over_long.expected_length: {over_long.expected_length} has no effect without "
                "rewards.over_long.buffer; set the tokens over which the penalty grows"
            )
    elif config.rollout.environment is not None:
        if over_long.expected_length is None:
            yield (
                f"rewards.over_long.buffer: {buffer}: rollout.max_new_tokens limits a turn, not an episode; "
                "set rewards.over_long.expected_length"
            )
    elif over_long.expected_length is None and buffer > longest:
        yield (
            f"rewards.over_long.buffer: {buffer} is more than rollout.max_new_tokens {longest}; "
            "lower it or set rewards.over_long.expected_length"
        )
    elif (over_long.expected_length or 0) >= longest:
        yield (
            f"rewards.over_long.expected_length: {over_long.expected_length}: no response is longer than "
            f"rollout.max_new_tokens {longest}; lower it"
        )
