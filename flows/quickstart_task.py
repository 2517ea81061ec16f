"""The quickstart's world: customers ask, an agent replies, and a known rule says what a good reply is.

The rule makes the preference pairs, and it judges the policy in the end. Training never sees it: PPO
optimises a reward model that learned from the pairs. What the files hold is a function of a seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

POLITE = frozenset({"please", "thank", "sorry", "gladly", "happy", "welcome"})
RUDE = frozenset({"fool", "nonsense", "silly", "yourself", "stop", "problem"})
TOPICS = (
    *("order", "refund", "parcel", "invoice", "ticket", "account", "book", "chair"),
    *("lamp", "phone", "table", "coat", "clock", "letter", "bike", "camera"),
)
QUESTIONS = (
    "where is my {topic} ?",
    "when will my {topic} come ?",
    "can you help me with my {topic} ?",
    "i have a question about my {topic} .",
    "my {topic} is not here .",
    "who can look at my {topic} ?",
    "i want to send my {topic} back .",
    "is my {topic} on the way ?",
)
HELD_OUT_EVERY = 5
"""Of the pairs of question and topic, counted in order, every fifth occurs in held-out files only."""

Tone = str
TONES: Mapping[Tone, float] = {"polite": 0.35, "neutral": 0.4, "rude": 0.25}
"""How often a part of a reply in the corpus has this tone."""
OPENINGS: Mapping[Tone, tuple[str, ...]] = {
    "polite": ("hello and welcome .", "thank you for your question .", "sorry for the wait ."),
    "neutral": ("hello .", "well ,", "i see .", "let me look ."),
    "rude": ("what now , fool ?", "this is nonsense .", "not again , stop ."),
}
BODIES: Mapping[Tone, tuple[str, ...]] = {
    "polite": (
        "we will gladly send your {topic} today .",
        "please wait for your {topic} until monday .",
        "i am happy to look at your {topic} .",
    ),
    "neutral": (
        "your {topic} is on the way .",
        "the {topic} will come on monday .",
        "we have your {topic} here .",
    ),
    "rude": (
        "look for your {topic} yourself .",
        "your {topic} is not my problem .",
        "that is a silly question about a {topic} .",
    ),
}
CLOSINGS: Mapping[Tone, tuple[str, ...]] = {
    "polite": ("thank you for your time .", "please write again .", "we are happy to help ."),
    "neutral": ("that is all .", "this can take a day", "we will write", ""),
    "rude": ("stop asking me", "do not write again , fool .", "that is your problem"),
}


@dataclass(frozen=True, kw_only=True)
class TaskSizes:
    """Rows of each file."""

    sft: int = 5120
    pairs: int = 4096
    pairs_heldout: int = 512
    prompts: int = 4096
    prompts_heldout: int = 256


def rule_score(reply: str) -> float:
    """How good a reply is, in [0, 1].

    Half for courtesy (two different polite words are enough), half for saying nothing rude. The
    sum is halved when the reply does not end with a full stop, and again when it says the same three
    words twice: piling up polite words is no way to a full score.
    """
    words = reply.split()
    courtesy = min(len(POLITE.intersection(words)), 2) / 2
    score = 0.5 * courtesy + 0.5 * RUDE.isdisjoint(words)
    if not words or words[-1] != ".":
        score *= 0.5
    if repeats_itself(words):
        score *= 0.5
    return score


def repeats_itself(words: list[str]) -> bool:
    """Whether three words in a row occur twice in the same order."""
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return len(set(triples)) < len(triples)


def sample_prompt(random: Random, *, held_out: bool) -> tuple[str, str]:
    """(prompt, its topic); held-out prompts are never among the others."""
    combinations = [(question, topic) for question in QUESTIONS for topic in TOPICS]
    question, topic = random.choice(
        [pair for i, pair in enumerate(combinations) if (i % HELD_OUT_EVERY == 0) == held_out]
    )
    return f"customer : {question.format(topic=topic)} agent :", topic


def sample_reply(topic: str, random: Random) -> str:
    """A reply of three parts, each in a tone of its own, as in the corpus."""
    tones = random.choices(list(TONES), weights=list(TONES.values()), k=3)
    parts = (random.choice(part[tone]) for part, tone in zip((OPENINGS, BODIES, CLOSINGS), tones, strict=True))
    return " ".join(" ".join(parts).format(topic=topic).split())


def sft_rows(count: int, random: Random) -> Iterable[dict[str, str]]:
    for _ in range(count):
        prompt, topic = sample_prompt(random, held_out=False)
        yield {"prompt": prompt, "response": sample_reply(topic, random)}


def pair_rows(count: int, random: Random, *, held_out: bool) -> Iterable[dict[str, str]]:
    """Two replies to one prompt, ordered by the rule; a tie is drawn again."""
    for _ in range(count):
        prompt, topic = sample_prompt(random, held_out=held_out)
        first = second = sample_reply(topic, random)
        while rule_score(first) == rule_score(second):
            second = sample_reply(topic, random)
        rejected, chosen = sorted((first, second), key=rule_score)
        yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def prompt_rows(count: int, random: Random, *, held_out: bool) -> Iterable[dict[str, str]]:
    for _ in range(count):
        yield {"prompt": sample_prompt(random, held_out=held_out)[0]}


def vocabulary() -> list[str]:
    """Every word that a prompt or a reply can hold, sorted."""
    templates = [*QUESTIONS, *TOPICS, "customer : agent :"]
    for part in (OPENINGS, BODIES, CLOSINGS):
        templates += [text for texts in part.values() for text in texts]
    words = {word for text in templates for word in text.split()}
    return sorted(words - {"{topic}"})


def write_task(directory: Path, *, seed: int = 0, sizes: TaskSizes | None = None) -> None:
    """Write the JSONL files and the directory `tokenizer/`.

    Files: sft, pairs, pairs_heldout, prompts, prompts_heldout. No prompt of a held-out file is in
    any of the others.
    """
    sizes = sizes or TaskSizes()
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, Iterable[dict[str, str]]] = {
        "sft": sft_rows(sizes.sft, Random(f"{seed}/sft")),
        "pairs": pair_rows(sizes.pairs, Random(f"{seed}/pairs"), held_out=False),
        "pairs_heldout": pair_rows(sizes.pairs_heldout, Random(f"{seed}/pairs_heldout"), held_out=True),
        "prompts": prompt_rows(sizes.prompts, Random(f"{seed}/prompts"), held_out=False),
        "prompts_heldout": prompt_rows(sizes.prompts_heldout, Random(f"{seed}/prompts_heldout"), held_out=True),
    }
    for name, rows in files.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    write_tokenizer(directory / "tokenizer")


def write_tokenizer(directory: Path) -> None:
    """A word-level tokenizer over `vocabulary()` as a Hugging Face directory."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *vocabulary()]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=256,
    )
    fast.save_pretrained(directory)
