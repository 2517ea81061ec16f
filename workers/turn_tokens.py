"""What stands between two actions of the policy, as token ids, without reading an earlier action again.

    ... prompt | action (sampled ids) | end of turn, observation's turn, head of the next turn | action | ...
                                        '-------------- this, tokenised once ---------------'

The sampled ids are the record: they are never decoded and encoded again. What the chat template puts after an
assistant's turn is taken from a conversation whose assistant says a marker, so that a template that renders
earlier turns anew (drops their reasoning, say) has no say in what was sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.errors import UserError
from workers.chat import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKER = "hybridflow-assistant-turn"
OBSERVATION = "hybridflow-observation"


class TurnTokens:
    """Tokens of observations.

    chat: the prompts are rendered with the chat template; else an observation is its own text and nothing more.
    Raises UserError, naming the tokenizer, where the template refuses such a conversation or loses a part of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool, role: str) -> None:
        self._tokenizer = tokenizer
        self._before, self._after = _around_observation(tokenizer, role) if chat else ("", "")

    def ids(self, observation: str, *, stopped_by: int | None) -> tuple[int, ...]:
        """The ids after an action: what closes its turn, the observation, the head of the next turn.

        stopped_by: the stop token that ended the action; where it closes the turn it is not written twice.
        """
        text = f"{self._before}{observation}{self._after}"
        ids = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids[1:] if self._before and ids[:1] == (stopped_by,) else ids


def _around_observation(tokenizer: PreTrainedTokenizerBase, role: str) -> tuple[str, str]:
    """The template's text between an assistant's words and the observation, and from there to the next answer."""
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": MARKER},
        {"role": role, "content": OBSERVATION},
    ]
    text = render(tokenizer, messages, add_generation_prompt=True)
    parts = text.split(MARKER)
    around = parts[-1].split(OBSERVATION)
    if len(parts) != 2 or len(around) != 2:
        lost = "the assistant's turn" if len(parts) != 2 else "the observation"
        raise UserError(
            f"the chat template of {tokenizer.name_or_path!r} does not show {lost} once in a conversation of user, "
            f"assistant, {role}; set rollout.environment.observation_role, or use another template"
        )
    return around[0], around[1]
