"""Chat templates: conversations as the text that the model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError

from configs.errors import UserError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]


def as_messages(value: object, place: str) -> list[Message]:
    """The value of a messages column; raises UserError when it is no list of {role, content}."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise UserError(f"{place}: expected a list of {{role, content}} messages, found {shown(value)}")
    for message in value:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise UserError(f"{place}: a message needs `role` and `content`, found {shown(message)}")
    return list(value)


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    """The conversation as text; raises UserError when there is no template or it refuses the roles."""
    if not tokenizer.chat_template:
        raise UserError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template, which messages need; "
            "use an instruct model's tokenizer or a plain prompt column"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except TemplateError as error:
        raise UserError(
            f"the chat template of {tokenizer.name_or_path!r} refuses roles "
            f"{[message['role'] for message in messages]}: {error}"
        ) from error
    return str(text)


def split_last_turn(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[str, str]:
    """(prompt, rest): what stands before the last assistant turn, and what the template adds for it.

    Training on the rest is right only if a generation would have seen the same prompt. A template
    that renders the earlier turns differently once the answer is there is refused by name.
    """
    prompt = render(tokenizer, messages[:-1], add_generation_prompt=True)
    whole = render(tokenizer, messages, add_generation_prompt=False)
    if not whole.startswith(prompt):
        raise UserError(
            f"the chat template of {tokenizer.name_or_path!r} is not stable under prefixes: with the "
            f"answer added, the prompt changes {_first_difference(prompt, whole)}; "
            "a response mask would be wrong. Use another template, or prompt and response columns"
        )
    return prompt, whole[len(prompt) :]


def _first_difference(prompt: str, whole: str) -> str:
    pairs = enumerate(zip(prompt, whole, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(whole)))
    return f"at character {at} ({prompt[at : at + 20]!r} becomes {whole[at : at + 20]!r})"
