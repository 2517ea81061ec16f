"""Samples in full on a terminal: one below the other or side by side, tokens as rows or coloured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from configs.errors import printable
from flows.commands.tables import number, print_table
from flows.commands.token_view import coloured, legend, scale_of
from storage.token_text import TokenTexts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MEANS = ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
Sample = dict[str, Any]


class Look(Protocol):
    """How samples are shown."""

    @property
    def tokens(self) -> bool: ...
    @property
    def color(self) -> str | None: ...
    @property
    def side_by_side(self) -> bool: ...


def show_in_full(console: Console, prompts: list[dict[str, Any]], look: Look, texts: TokenTexts) -> None:
    """Every prompt with its samples. texts: asked only where tokens are shown one by one."""
    for prompt in prompts:
        answer = f"  answer {printable(str(prompt['answer']))}" if prompt.get("answer") else ""
        head = f"prompt {prompt['prompt']}, row {prompt.get('prompt_id', '?')} of the data{answer}"
        console.print(f"\n{head}\n{'-' * min(len(head), 80)}", markup=False)
        console.print(printable(str(prompt.get("prompt_text", prompt["prompt_tokens"]))), markup=False)
        samples: list[Sample] = prompt["samples"]
        bodies = _bodies(console, samples, look, texts)
        if look.side_by_side:
            _side_by_side(console, samples, bodies)
            continue
        for sample, body in zip(samples, bodies, strict=True):
            console.print(
                f"\nsample {sample.get('sample', '')}:  {'  '.join(_head(sample))}", markup=False, style="bold"
            )
            console.print(body)
            if look.tokens:
                _show_tokens(console, sample, texts)


def _bodies(console: Console, samples: Sequence[Sample], look: Look, texts: TokenTexts) -> list[Text]:
    from rich.text import Text

    if look.color is None:
        return [Text(printable(str(sample.get("text", "")))) for sample in samples]
    scale = scale_of(np.concatenate([sample[look.color] for sample in samples]).tolist())
    console.print(legend(look.color, scale))
    pieces = [texts.pieces(sample["token_ids"].tolist()) for sample in samples]
    return [coloured(p, s[look.color].tolist(), scale=scale) for p, s in zip(pieces, samples, strict=True)]


def _side_by_side(console: Console, samples: Sequence[Sample], bodies: Sequence[Text]) -> None:
    from rich.table import Table

    table = Table(expand=True, show_lines=True)
    for sample in samples:
        table.add_column(f"sample {sample.get('sample', '')}", ratio=1, overflow="fold")
    table.add_row(*("\n".join(_head(sample)) for sample in samples))
    table.add_row(*bodies)
    console.print(table)


def _head(sample: Sample) -> list[str]:
    parts = [f"{name} {number(value)}" for name, value in sample.items() if name.startswith("reward")]
    means = [f"mean {name} {number(mean_of(sample[name]))}" for name in MEANS if name in sample]
    reason = sample.get("finish_reason", "")
    return [f"{len(sample['token_ids'])} tokens", *([str(reason)] if reason else []), *parts, *means]


def mean_of(values: Any) -> float | None:
    """None where there are none."""
    return None if values is None or not len(values) else float(np.mean(values))


def _show_tokens(console: Console, sample: Sample, texts: TokenTexts) -> None:
    """A row for each token, with its text as Python writes it, so that spaces and line ends are seen."""
    columns = {name: v for name, v in sample.items() if isinstance(v, np.ndarray) and v.ndim == 1}
    pieces = list(map(repr, texts.pieces(sample["token_ids"].tolist())))
    rows = [(str(t), piece, *(number(v[t]) for v in columns.values())) for t, piece in enumerate(pieces)]
    print_table(console, ("token", "text", *columns), rows, num_right=2 + len(columns), left=("text",))
