"""Judges the quickstart's models on held-out rows, in this process and outside of the runs.

The policies are judged by the rule itself, which training never saw; the reward model by the rule's
pairs. Models are exported from checkpoints to Hugging Face directories and loaded as anybody would.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from configs.errors import UserError
from flows.quickstart_task import rule_score
from pipeline.random import seed_of
from storage.checkpoints import CheckpointStore
from storage.run_directory import RunDirectory
from workers.checkpoint_io import export_checkpoint
from workers.engines.base import GenerateRequest, SamplingParams
from workers.engines.torch_engine import TorchEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH = 128
"""Rows of one forward pass."""


@dataclass(frozen=True, kw_only=True)
class Replies:
    """Sampled replies to held-out prompts.

    prompt_ids, reply_ids: token ids, one list a reply. log_probs: sum over the reply's tokens (nats).
    """

    prompt_ids: list[list[int]]
    reply_ids: list[list[int]]
    texts: list[str]
    log_probs: list[float]

    @property
    def rule(self) -> float:
        """The rule's mean score."""
        return sum(map(rule_score, self.texts)) / len(self.texts)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Progress bars of the libraries are no news to somebody who waits for three numbers."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    yield
    if bars:
        logging.enable_progress_bar()


def exported(run_dir: Path, role: str) -> Path:
    """The role of a run's last checkpoint as a Hugging Face directory in the run's `exports/`."""
    run = RunDirectory.open(run_dir)
    target = run_dir / "exports" / role
    latest = CheckpointStore(run.checkpoints).latest()
    if latest is None:
        raise UserError(f"{run_dir}: has no committed checkpoint; go on with: hybridflow resume {run_dir}")
    return target if target.exists() else export_checkpoint(latest.path, role, run.config(), target)


def sample_replies(model_dir: Path, prompts: Sequence[str], *, max_new_tokens: int, seed: int) -> Replies:
    """One reply to each prompt at temperature 1, by the embedded engine."""
    from transformers import AutoModelForCausalLM

    tokenizer = _tokenizer(model_dir)
    engine = TorchEngine(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32))
    prompt_ids = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    requests = [
        GenerateRequest(request_id=i, prompt_tokens=ids, seeds=(seed_of(seed, "quickstart", i),))
        for i, ids in enumerate(prompt_ids)
    ]
    sampling = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=(tokenizer.eos_token_id,))
    samples = [result.samples[0] for result in engine.generate(requests, sampling)]
    engine.shutdown()
    return Replies(
        prompt_ids=prompt_ids,
        reply_ids=[list(map(int, sample.token_ids)) for sample in samples],
        texts=[tokenizer.decode(sample.token_ids, skip_special_tokens=True) for sample in samples],
        log_probs=[float(sample.log_probs.sum()) for sample in samples],
    )


def kl_per_sequence(replies: Replies, reference_dir: Path) -> float:
    """Monte Carlo estimate of KL(policy || reference) in nats a reply: mean of the log-ratio's sums."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(reference_dir, dtype=torch.float32).eval()
    total = 0.0
    for start in range(0, len(replies.texts), BATCH):
        rows = slice(start, start + BATCH)
        sums = _reply_log_probs(model, replies.prompt_ids[rows], replies.reply_ids[rows])
        total += sum(replies.log_probs[rows]) - float(sums.sum())
    return total / len(replies.texts)


def pair_accuracy(model_dir: Path, pairs: Sequence[dict[str, str]]) -> float:
    """Share of pairs whose chosen reply the reward model scores higher."""
    from transformers import AutoModelForSequenceClassification

    tokenizer = _tokenizer(model_dir)
    model = AutoModelForSequenceClassification.from_pretrained(model_dir, dtype=torch.float32).eval()
    right = 0
    for start in range(0, len(pairs), BATCH):
        batch = pairs[start : start + BATCH]
        chosen, rejected = (_scores(model, tokenizer, batch, column) for column in ("chosen", "rejected"))
        right += int((chosen > rejected).sum())
    return right / len(pairs)


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@torch.no_grad()
def _scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[dict[str, str]], column: str
) -> Tensor:
    """float32 [B], the score at the end of each sequence."""
    ids = [
        [*tokenizer(pair["prompt"])["input_ids"], *tokenizer(pair[column])["input_ids"], tokenizer.eos_token_id]
        for pair in pairs
    ]
    padded, mask = _padded(ids)
    scores: Tensor = model.score(model.base_model(padded, attention_mask=mask).last_hidden_state)[..., 0]
    return scores.gather(1, mask.sum(1, keepdim=True) - 1).flatten()


@torch.no_grad()
def _reply_log_probs(model: PreTrainedModel, prompts: Sequence[list[int]], replies: Sequence[list[int]]) -> Tensor:
    """float32 [B], the sum of the log-probabilities of each reply's tokens."""
    padded, mask = _padded([prompt + reply for prompt, reply in zip(prompts, replies, strict=True)])
    log_probs = model(padded, attention_mask=mask).logits[:, :-1].float().log_softmax(-1)
    chosen = log_probs.gather(2, padded[:, 1:, None])[..., 0]
    starts = torch.tensor([len(prompt) for prompt in prompts])
    is_reply = (torch.arange(1, padded.shape[1]) >= starts[:, None]) & (mask[:, 1:] > 0)
    total: Tensor = (chosen * is_reply).sum(1)
    return total


def _padded(rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """int64 ids and mask [B, longest], padded on the right."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask


def _tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)
