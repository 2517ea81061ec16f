"""Prompts beside the model that is to continue them: told once, with the row, before anything is generated."""

from __future__ import annotations

from configs.errors import UserError
from workers.data_source import PromptSource


def check_prompts(source: PromptSource, *, positions: int | None, vocabulary: int, max_new_tokens: int) -> None:
    """Raises UserError for a prompt that does not fit the actor.

    positions: of prompt and response together (`max_position_embeddings`); None: no limit. vocabulary: number
    of token ids of the model.
    """
    longest = source.longest()
    if positions is not None and len(longest.tokens) + max_new_tokens > positions:
        shorter = f", or data.max_prompt_tokens to {positions - max_new_tokens}" if max_new_tokens < positions else ""
        raise UserError(
            f"{source.place(longest)}: {len(longest.tokens)} prompt tokens and rollout.max_new_tokens "
            f"{max_new_tokens} exceed the actor's {positions} positions (max_position_embeddings); lower "
            f"rollout.max_new_tokens{shorter}"
        )
    for prompt in source.prompts(range(len(source))):
        if max(prompt.tokens) >= vocabulary:
            raise UserError(
                f"{source.place(prompt)}: token id {max(prompt.tokens)} is outside the actor's vocabulary of "
                f"{vocabulary} ids; the tokenizer is another model's: correct `tokenizer`, or vocab_size in actor.init"
            )
