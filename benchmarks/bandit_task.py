"""A bandit over sequences: a letter asks for a word, each possible word is an arm, and its reward is known.

The reward is the share of places that hold the wanted letter; the cost, for Safe-RLHF, is 1 where the
first place does. The best return, with or without a limit on the mean cost, follows from all arms' values.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

LETTERS = "abcd"
LENGTH = 2
WORDS = {"a": "ca", "b": "db", "c": "ad", "d": "bc"}
"""Prompt to wanted word; at each place every prompt wants a letter of its own."""


def share_of_letters(prompt: str, response: str, answer: object) -> float:
    """Reward: places of the response that hold the answer's letter, of LENGTH."""
    return sum(given == wanted for given, wanted in zip(response, str(answer), strict=False)) / LENGTH


def first_letter(prompt: str, response: str, answer: object) -> float:
    """Cost: 1 where the first place holds the answer's letter."""
    return float(response[:1] == str(answer)[:1])


def best_return(cost_limit: float | None = None) -> float:
    """The largest mean reward of any policy, over all arms; cost_limit: of those whose mean cost is not above it.

    A prompt's arms matter by (reward, cost) alone, and costs are 0 or 1: the best policy under a limit takes the
    best arm with cost 1 as often as the limit allows, where it is better, and the best one without cost otherwise.
    """
    total = 0.0
    for prompt, word in WORDS.items():
        best = {0.0: 0.0, 1.0: 0.0}
        for arm in map("".join, product(LETTERS, repeat=LENGTH)):
            cost = first_letter(prompt, arm, word)
            best[cost] = max(best[cost], share_of_letters(prompt, arm, word))
        allowed = 1.0 if cost_limit is None else cost_limit
        total += best[0.0] + allowed * max(0.0, best[1.0] - best[0.0])
    return total / len(WORDS)


def write_task(folder: Path) -> tuple[Path, Path]:
    """The prompts' file and a tokenizer of single letters; returns both paths."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p, "answer": w}) + "\n" for p, w in WORDS.items()))
    vocabulary = {token: number for number, token in enumerate(("<pad>", "<eos>", "<unk>", *LETTERS))}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    return prompts, folder / "tokenizer"
