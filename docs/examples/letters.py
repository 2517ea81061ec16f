"""The reward of letters.yaml; run by itself, it makes the prompts and the tokenizer: nothing is downloaded."""

import json
import string

LETTERS = string.ascii_lowercase


def follows(prompt: str, response: str, answer: str | None) -> float:
    """1 where the response begins with the letter after the prompt's."""
    return float(response[:1] == LETTERS[(LETTERS.index(prompt) + 1) % len(LETTERS)])


def make_inputs() -> None:
    """`letters.jsonl`, a prompt a line, and the folder `letters`, a tokenizer with an id for each letter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate(["<pad>", "<eos>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained("letters")
    with open("letters.jsonl", "w") as file:
        file.writelines(json.dumps({"prompt": letter}) + "\n" for letter in LETTERS)


if __name__ == "__main__":
    make_inputs()
