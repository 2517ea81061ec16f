"""Samples of a store, looked up by their columns: an iteration at a time, only the columns that are asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from configs.errors import UserError, suggestion
from pipeline.rollouts import Array, Rollouts, sequence_ids
from storage.records import ArrayRecord
from storage.rollout_store import RolloutStore
from storage.where import REDUCTIONS, Condition, Operand, operands

TOKEN_DIFFERENCES: Mapping[str, tuple[str, str]] = {
    "log_prob_gap": ("log_probs", "rollout_log_probs"),
    "ref_gap": ("log_probs", "ref_log_probs"),
}
"""Token columns that are computed: the first column minus the second."""
DERIVED = ("iteration", "row", "length", "tokens")
"""Sample columns that are computed: iteration, place in it, response tokens, all tokens."""
LAYOUT = ("prompt_length", "response_mask")


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Some columns of one iteration. known: every column that it has, stored or computed, with its kind."""

    iteration: int
    rollouts: Rollouts
    known: Mapping[str, str]

    def __len__(self) -> int:
        return self.rollouts.num_rows

    def sample(self, name: str) -> Array:
        """A sample column [B], stored or derived. Raises UserError for one that is not there."""
        if name in self.rollouts.sample_columns:
            return self.rollouts.sample_columns[name]
        if self.known.get(name) == "token":
            raise UserError(f"{name!r} has a value for each token; take one of {'|'.join(REDUCTIONS)}({name})")
        match name:
            case "iteration":
                return np.full(len(self), self.iteration)
            case "row":
                return np.arange(len(self))
            case "length":
                return np.asarray(self.rollouts.lengths - self.prompt_lengths)
            case "tokens":
                return self.rollouts.lengths
        raise unknown_column(name, self.known)

    def token(self, name: str) -> Array:
        """A token column [T], stored or the difference of two. Raises UserError for one that is not there."""
        if name in TOKEN_DIFFERENCES and all(part in self.rollouts for part in TOKEN_DIFFERENCES[name]):
            first, second = (self.rollouts.token_columns[part] for part in TOKEN_DIFFERENCES[name])
            return np.asarray((first - second) * self._response)
        if name not in self.rollouts.token_columns:
            if self.known.get(name) == "sample":
                raise UserError(f"{name!r} has one value for a sample, no value for each token; name it alone")
            raise unknown_column(name, self.known)
        return self.rollouts.token_columns[name]

    def reduced(self, reduction: str, name: str) -> Array:
        """float64 [B] over the tokens that the policy emitted; NaN where there are none."""
        return reduce_tokens(reduction, self.token(name), self.rollouts.offsets, self._response)

    def response(self, row: int) -> slice:
        """Where a row's response lies in the token columns."""
        start, end = self.rollouts.offsets[row : row + 2]
        return slice(int(start) + int(self.prompt_lengths[row]), int(end))

    @cached_property
    def prompt_lengths(self) -> Array:
        """int [B], 0 where it is not stored."""
        columns = self.rollouts.sample_columns
        return columns["prompt_length"] if "prompt_length" in columns else np.zeros(len(self), np.int64)

    @cached_property
    def _response(self) -> Array:
        """bool [T]: tokens that the policy emitted."""
        if "response_mask" in self.rollouts:
            return np.asarray(self.rollouts["response_mask"] > 0)
        within = np.arange(self.rollouts.num_tokens) - np.repeat(self.rollouts.offsets[:-1], self.rollouts.lengths)
        return np.asarray(within >= np.repeat(self.prompt_lengths, self.rollouts.lengths))


def reduce_tokens(reduction: str, values: Array, offsets: Array, counted: Array) -> Array:
    """One number of each sequence's counted tokens, float64 [B]; NaN where a sequence has none.

    values, counted: [T]. std is that of the population. A NaN among the values makes the sequence's number NaN.
    """
    rows, kept = sequence_ids(offsets)[counted], values[counted].astype(np.float64)
    counts = np.bincount(rows, minlength=len(offsets) - 1)
    filled = np.flatnonzero(counts)
    starts = (np.cumsum(counts) - counts)[filled]
    result = np.full(len(counts), np.nan)
    if not len(filled):
        return result
    if reduction in ("first", "last"):
        result[filled] = kept[starts if reduction == "first" else starts + counts[filled] - 1]
        return result
    if reduction in ("min", "max"):
        result[filled] = (np.minimum if reduction == "min" else np.maximum).reduceat(kept, starts)
        return result
    sums = np.add.reduceat(kept, starts)
    means = sums / counts[filled]
    if reduction == "std":
        squares = np.add.reduceat((kept - np.repeat(means, counts[filled])) ** 2, starts)
        result[filled] = np.sqrt(squares / counts[filled])
    else:
        result[filled] = means if reduction == "mean" else sums
    return result


def unknown_column(name: str, known: Iterable[str]) -> UserError:
    return UserError(f"no column {name!r}; {suggestion(name, known, noun='column')}")


def known_columns(store: RolloutStore, iteration: int) -> dict[str, str]:
    """Stored and computed columns of an iteration, `token` or `sample`; empty when no rows are committed."""
    arrays = {array.name: str(array.kind) for array in _arrays(store, iteration)}
    if arrays.pop("offsets", None) is None:
        return {}
    differences = [name for name, parts in TOKEN_DIFFERENCES.items() if all(part in arrays for part in parts)]
    return {**arrays, **dict.fromkeys(differences, "token"), **dict.fromkeys(DERIVED, "sample")}


def _arrays(store: RolloutStore, iteration: int) -> list[ArrayRecord]:
    """Committed arrays of the iteration's own rows, without those of other row sets."""
    return [a for record in store.stages(iteration).values() if not record.row_set for a in record.arrays]


def stored_columns(store: RolloutStore, iterations: Sequence[int]) -> dict[str, tuple[str, str]]:
    """Every column that one of these iterations has: its kind and the dtype that holds it in all of them."""
    found: dict[str, tuple[str, str]] = {}
    for iteration in iterations:
        for array in _arrays(store, iteration):
            dtype = array.dtype
            if array.name in found and found[array.name][1] != dtype:
                dtype = np.promote_types(found[array.name][1], dtype).name
            found[array.name] = (array.kind, dtype)
    found.pop("offsets", None)
    return found


def load_samples(store: RolloutStore, iteration: int, columns: Sequence[str] | None) -> Samples:
    """These columns of an iteration (None: all), verified, and what their layout needs.

    Raises UserError for a column that is not there, StorageError for damage.
    """
    known = known_columns(store, iteration)
    return _load(store, iteration, known, list(known) if columns is None else columns)


def _load(store: RolloutStore, iteration: int, known: Mapping[str, str], columns: Sequence[str]) -> Samples:
    for name in columns:
        if name not in known:
            raise unknown_column(name, known)
    stored = [part for name in columns for part in TOKEN_DIFFERENCES.get(name, (name,)) if part not in DERIVED]
    layout = ["prompt_length"]
    if any(known[name] == "token" for name in columns):
        layout.append("response_mask")  # as long as the tokens: read with token columns only
    needed = dict.fromkeys([*stored, *(name for name in layout if name in known)])
    rollouts = store.read(iteration, columns=list(needed))
    return Samples(iteration=iteration, rollouts=rollouts, known=known)


@dataclass(frozen=True, kw_only=True)
class Query:
    """iterations: in this order. where: None takes every row. columns: read beside those of `where`.

    optional: read where an iteration has them; None: every column.
    """

    iterations: Sequence[int]
    where: Condition | None = None
    columns: Sequence[str] = ()
    optional: Sequence[str] | None = ()

    @property
    def needed(self) -> list[str]:
        """Columns that an iteration must have to be looked at."""
        asked = operands(self.where) if self.where is not None else []
        return list(dict.fromkeys([*self.columns, *(str(operand.name) for operand in asked)]))


@dataclass(frozen=True, kw_only=True)
class Found:
    """Rows of one iteration that a query takes, ascending."""

    samples: Samples
    rows: Array


def search(store: RolloutStore, query: Query) -> Iterator[Found]:
    """Iterations with their rows that match, read one at a time.

    An iteration that lacks a needed column (its stage is not committed yet) is passed over. Raises UserError
    when every iteration lacks it, StorageError for damage.
    """
    lacking: list[dict[str, str]] = []
    for iteration in query.iterations:
        known = known_columns(store, iteration)
        if not known or any(name not in known for name in query.needed):
            lacking.append(known)
            continue
        optional = list(known) if query.optional is None else [name for name in query.optional if name in known]
        samples = _load(store, iteration, known, [*query.needed, *optional])
        rows = np.arange(len(samples)) if query.where is None else np.flatnonzero(query.where.rows(samples))
        yield Found(samples=samples, rows=rows)
    if lacking and len(lacking) == len(query.iterations):
        known = max(lacking, key=len)
        missing = next((name for name in query.needed if name not in known), None)
        raise unknown_column(missing, known) if known and missing else UserError("no rollouts are committed there yet")


def chosen_iterations(text: str | None, available: Sequence[int], *, option: str = "--iterations") -> list[int]:
    """`7`, `3:10` (without 10), `5:`, `:5`, `-1` (the last), `-3:`; None: all. Raises UserError."""
    if not available:
        raise UserError("the run has no committed rollouts yet")
    if text is None:
        return list(available)
    match = re.fullmatch(r"\s*(-?\d+)?\s*(:)?\s*(-?\d+)?\s*", text)
    if match is None or not text.strip() or (match[2] is None and match[3] is not None):
        raise UserError(f"{option} {text!r}: a number or FIRST:END, as in 3:10, 5: or -1")
    first = _place(match[1], available, available[0])
    if match[2] is None:
        found = [i for i in available if i == first]
    else:
        end = _place(match[3], available, available[-1] + 1)
        found = [i for i in available if first <= i < end]
    if not found:
        raise UserError(f"{option} {text}: none is stored; there are {available[0]} to {available[-1]}")
    return found


def _place(text: str | None, available: Sequence[int], default: int) -> int:
    if text is None:
        return default
    number = int(text)
    return number if number >= 0 else available[-1] + 1 + number


__all__ = ["Found", "Operand", "Query", "Samples", "chosen_iterations", "load_samples", "search"]
