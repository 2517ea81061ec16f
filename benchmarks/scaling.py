"""How the throughput of `benchmarks.iteration` grows with the number of GPUs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.shapes import geometry_of
from configs.errors import UserError

EQUAL = (
    "shape", "layers", "engine", "tp", "samples", "prompt_tokens", "new_tokens", "micro_batch_tokens", "reference",
    "warm_up", "iterations", "set",
)  # fmt: skip
"""Options that both runs have to share."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """The run to compare with. ranks: GPUs, or processes where there are none. software, card: with which it ran."""

    path: str
    ranks: int
    prompts: int
    tokens_per_s: float
    software: str
    card: str | None

    def kind(self, *, prompts: int, ranks: int) -> str:
        """strong: the same batch; weak: one that grows with the ranks; empty: neither."""
        if prompts == self.prompts:
            return "strong"
        return "weak" if prompts * self.ranks == self.prompts * ranks else ""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """kind: strong (the same batch on more ranks) or weak (the batch grows with them). share: of ideal growth."""

    kind: str
    ranks: tuple[int, int]
    ratio: float
    share: float

    def __str__(self) -> str:
        grown = f"{self.ratio:.2f} times the tokens/s, {self.share:.1%} of ideal"
        return f"{self.kind} scaling from {self.ranks[0]} to {self.ranks[1]}: {grown}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def base_of(path: str, options: argparse.Namespace, *, software: str) -> Base:
    """What `--output` of an earlier run holds. Raises UserError where the two cannot be compared.

    software: versions of this run.
    """
    option = f"--against {path}"
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        theirs: Mapping[str, Any] = document["options"]
        base = Base(
            path=path,
            ranks=num_ranks(theirs),
            prompts=int(theirs["prompts"]),
            tokens_per_s=float(document["tokens_per_s"]),
            software=str(document["software"]),
            card=document["card"],
        )
    except OSError as error:
        raise UserError(f"{option}: {error.strerror}; name what --output of another run has written") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"{option}: is not what --output of this benchmark writes") from error
    ours = {**vars(options), "layers": num_layers(options)}
    try:
        theirs = {**theirs, "layers": num_layers(argparse.Namespace(**{"layers": None, **theirs}))}
    except (UserError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{option}: is not what --output of this benchmark writes") from error
    for name in EQUAL:
        if theirs.get(name) != ours[name]:
            there, typed = theirs.get(name), name.replace("_", "-")
            raise UserError(f"{option}: was made with --{typed} {there}, this run has {ours[name]}; make them the same")
    if not 0 < base.tokens_per_s < math.inf or min(base.ranks, base.prompts) < 1:
        told = f"{base.tokens_per_s} tokens/s of {base.ranks} ranks and {base.prompts} prompts"
        raise UserError(f"{option}: has {told}, which no run has; name another file")
    if base.software != software:
        raise UserError(f"{option}: ran with {base.software}, this run has {software}; make it again")
    if (theirs.get("gpus") == 0) != (options.gpus == 0):
        raise UserError(f"{option}: one of the two runs is on GPUs and the other is not")
    if base.ranks >= num_ranks(ours):
        raise UserError(f"{option}: ranks were {base.ranks}, this run has {num_ranks(ours)}; name a run on fewer")
    if not base.kind(prompts=options.prompts, ranks=num_ranks(ours)):
        wanted = base.prompts * num_ranks(ours) / base.ranks
        weak = f", or --prompts {wanted:.0f} for weak" if wanted == int(wanted) else ""
        raise UserError(f"{option}: had --prompts {base.prompts}; the same for strong scaling{weak}")
    return base


def num_layers(options: argparse.Namespace) -> int:
    """Of the model; those of the shape where `--layers` is left out."""
    return geometry_of(options).num_layers


def num_ranks(options: Mapping[str, Any]) -> int:
    """GPUs of the options, or processes where there are none."""
    return int(options["gpus"] or options["ranks"] or 1)


def scaling(base: Base, result: Mapping[str, Any], options: argparse.Namespace) -> Scaling | None:
    """From the base to a run with this result; None where that was on another card."""
    if result["card"] != base.card:
        return None
    ranks = num_ranks(vars(options))
    kind = base.kind(prompts=options.prompts, ranks=ranks)
    ratio = result["tokens_per_s"] / base.tokens_per_s
    return Scaling(kind=kind, ranks=(base.ranks, ranks), ratio=ratio, share=ratio * base.ranks / ranks)
