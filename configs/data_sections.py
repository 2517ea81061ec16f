"""Data: rows and what is read from them (part of `configs.schema`)."""

from __future__ import annotations

from typing import Any, Literal

from configs.section import Options, PositiveInt, Section, Seed


class DatasetConfig(Section):
    """Where rows come from."""

    source: Literal["file", "datasets", "reasoning_gym"] = "file"
    """`file`: JSONL or Parquet at `path`; `datasets`: `datasets.load_dataset(path, split=split)`; `reasoning_gym`: the generator named by `path`."""
    path: str
    """File, data set or generator name."""
    split: str = "train"
    """Split of a `datasets` source."""
    size: PositiveInt | None = None
    """Rows taken (or generated); null: all."""
    seed: Seed = 0
    """Seed of a generated source."""
    options: Options = {}
    """Further arguments of the generator or of `load_dataset`."""


class DataConfig(Section):
    """Prompts (RL), sequences (SFT) or preference pairs (reward model)."""

    may_be_blank = frozenset({"system_prompt"})
    train: DatasetConfig | None = None
    """Rows to train on."""
    validation: DatasetConfig | None = None
    """Held-out rows for evaluation."""
    pretraining: DatasetConfig | None = None
    """Texts whose likelihood is learnt beside the policy (Safe-RLHF's PTX loss); null: none."""
    pretraining_column: str = "text"
    """Column of `pretraining` with the text."""
    pretraining_batch_size: PositiveInt = 8
    """Texts of one iteration, spread over its optimizer steps."""
    max_pretraining_tokens: PositiveInt = 512
    """Longer texts are cut here."""
    prompt_column: str = "prompt"
    """Text of the prompt; ignored when `messages_column` is set."""
    messages_column: str | None = None
    """Chat messages ({role, content} list); rendered with the tokenizer's chat template."""
    response_column: str = "response"
    """SFT: the text to learn after the prompt."""
    chosen_column: str = "chosen"
    """Reward model: the preferred response."""
    rejected_column: str = "rejected"
    """Reward model: the other response."""
    chosen_safe_column: str = "chosen_is_safe"
    """Cost model, whose chosen response is the safer one: whether it is safe (true or false)."""
    rejected_safe_column: str = "rejected_is_safe"
    """Cost model: whether the rejected response, the more harmful one, is safe."""
    answer_column: str | None = None
    """Passed to reward functions as `answer`; null: none."""
    system_prompt: str | None = None
    """With `prompt_column` and a chat template: prepended as a system message."""
    apply_chat_template: bool = False
    """Render `prompt_column` as one user message with the chat template."""
    batch_size: PositiveInt = 8
    """Prompts (or sequences, or pairs) of one iteration; an epoch's last batch may be smaller."""
    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are handled as `over_long_prompts` says."""
    max_response_tokens: PositiveInt = 512
    """SFT and pairs: responses are cut here."""
    over_long_prompts: Literal["drop", "truncate", "error"] = "drop"
    """drop the row, truncate from the left, or stop; the count is a metric."""
    seen_prompts: Literal["mix", "last"] = "mix"
    """Prompts that earlier runs of this `name` under `output` have sampled. last: each epoch takes the new ones first; mix: no difference."""
    exclude_held_out: bool = False
    """Prompts: leave training rows out whose prompt is also in `validation`; the count is a metric."""
    sampler: str | None = None
    """`module:function` or `file.py:function` that chooses each iteration's prompts from what earlier ones stored (docs/extending.md); null: every prompt once an epoch."""
    sampler_options: dict[str, Any] = {}
    """Keyword arguments of the sampler."""
    shuffle: bool = True
    """A new permutation each epoch, a function of (seed, epoch)."""
