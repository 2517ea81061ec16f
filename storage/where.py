"""Filters over the columns of rollouts: `reward < 0 and (length > 100 or text ~ "sorry")`.

    condition   a and b, a or b, not a, (a), operand OP operand, operand in (literal, ...)
    OP          = == != < <= > >=, and for text ~ !~ (a regular expression is found somewhere, or nowhere)
    operand     a sample column, REDUCTION(token column), a number, a quoted text
    REDUCTION   mean, sum, min, max, std, first, last: over the response tokens of a sample

Text is parsed by the grammar below and by nothing else: no Python is ever evaluated.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from configs.errors import UserError
from pipeline.rollouts import Array

REDUCTIONS = ("mean", "sum", "min", "max", "std", "first", "last")
COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
MATCHES = ("~", "!~")
MAX_CHARACTERS = 2000
MAX_DEPTH = 50
TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)
    |(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<name>[A-Za-z_][\w./\#]*)
    |(?P<sign>==|!=|<=|>=|!~|[=<>~(),])
    )""",
    re.VERBOSE,
)


class Columns(Protocol):
    """Where an expression's values come from. Both raise UserError for a column that is not there."""

    def sample(self, name: str) -> Array:
        """[B]; text is of dtype object."""

    def reduced(self, reduction: str, name: str) -> Array:
        """float64 [B]: a token column over each sample's response tokens, NaN where it has none."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A literal (reduction and name None), a sample column, or a reduced token column."""

    literal: int | float | str | None = None
    name: str | None = None
    reduction: str | None = None

    def values(self, columns: Columns) -> Any:
        if self.name is None:
            return self.literal
        return columns.sample(self.name) if self.reduction is None else columns.reduced(self.reduction, self.name)

    def __str__(self) -> str:
        if self.name is None:
            return repr(self.literal)
        return self.name if self.reduction is None else f"{self.reduction}({self.name})"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    left: Operand
    sign: str
    right: Operand

    def rows(self, columns: Columns) -> Array:
        left, right = self.left.values(columns), self.right.values(columns)
        if _is_text(left) != _is_text(right):
            raise UserError(f"--where: {self.left} {self.sign} {self.right} compares text with a number")
        return _boolean(COMPARISONS[self.sign](left, right), left, right)


@dataclass(frozen=True, kw_only=True)
class Match:
    """A regular expression in a text column."""

    column: Operand
    pattern: re.Pattern[str]
    found: bool

    def rows(self, columns: Columns) -> Array:
        values = self.column.values(columns)
        if not _is_text(values) or isinstance(values, str):
            raise UserError(f"--where: {self.column} ~ ...: {self.column} is no text column")
        return np.fromiter((bool(self.pattern.search(v)) is self.found for v in values), bool, len(values))


@dataclass(frozen=True, kw_only=True)
class Member:
    column: Operand
    literals: tuple[Operand, ...]

    def rows(self, columns: Columns) -> Array:
        comparisons = [Comparison(left=self.column, sign="=", right=literal).rows(columns) for literal in self.literals]
        return np.asarray(np.logical_or.reduce(comparisons))


@dataclass(frozen=True, kw_only=True)
class Junction:
    """and, or, or (of one part) not."""

    word: str
    parts: tuple[Condition, ...]

    def rows(self, columns: Columns) -> Array:
        parts = [part.rows(columns) for part in self.parts]
        if self.word == "not":
            return ~parts[0]
        return np.asarray((np.logical_and if self.word == "and" else np.logical_or).reduce(parts))


Condition = Comparison | Match | Member | Junction


def operands(condition: Condition) -> list[Operand]:
    """Every column that a condition looks at."""
    if isinstance(condition, Junction):
        return [operand for part in condition.parts for operand in operands(part)]
    found = [condition.left, condition.right] if isinstance(condition, Comparison) else [condition.column]
    return [operand for operand in found if operand.name is not None]


def parse_where(text: str) -> Condition:
    """Raises UserError with the place for what the grammar above does not know."""
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"--where: {len(text)} characters; at most {MAX_CHARACTERS}")
    parser = _Parser(text)
    condition = parser.disjunction(0)
    if parser.kind != "end":
        raise parser.unexpected("and, or, or the end")
    return condition


def _is_text(values: Any) -> bool:
    return isinstance(values, str) or (isinstance(values, np.ndarray) and values.dtype == object)


def _boolean(result: Any, left: Any, right: Any) -> Array:
    """A comparison of two literals has no rows of its own: it is refused by the parser."""
    length = len(left) if isinstance(left, np.ndarray) else len(right)
    return np.asarray(result, dtype=bool).reshape(length)


class _Parser:
    """Recursive descent over one token of look-ahead."""

    def __init__(self, text: str) -> None:
        self._text, self._end = text, 0
        self.kind, self.value, self._start = "end", "", 0
        self._advance()

    def _advance(self) -> None:
        rest = self._text[self._end :]
        self._start = self._end + len(rest) - len(rest.lstrip())
        if not rest.strip():
            self.kind, self.value = "end", ""
            return
        match = TOKEN.match(self._text, self._end)
        if match is None or match.lastgroup is None:
            raise UserError(f"--where: {self._text[self._start :]!r} (character {self._start + 1}) is not understood")
        self.kind, self.value, self._end = match.lastgroup, match.group(match.lastgroup), match.end()

    def unexpected(self, wanted: str) -> UserError:
        found = repr(self.value) if self.kind != "end" else "the end"
        return UserError(f"--where: {wanted} expected at character {self._start + 1}, found {found}: {self._text}")

    def _word(self, *words: str) -> bool:
        """Whether the next token is one of these words (kept)."""
        return self.kind == "name" and self.value in words

    def _take(self, sign: str) -> None:
        if (self.kind, self.value) != ("sign", sign):
            raise self.unexpected(repr(sign))
        self._advance()

    def disjunction(self, depth: int) -> Condition:
        return self._joined("or", self._conjunction, depth)

    def _conjunction(self, depth: int) -> Condition:
        return self._joined("and", self._negation, depth)

    def _joined(self, word: str, part: Callable[[int], Condition], depth: int) -> Condition:
        parts = [part(depth)]
        while self._word(word):
            self._advance()
            parts.append(part(depth))
        return parts[0] if len(parts) == 1 else Junction(word=word, parts=tuple(parts))

    def _negation(self, depth: int) -> Condition:
        if depth > MAX_DEPTH:
            raise UserError(f"--where: nested deeper than {MAX_DEPTH}")
        if self._word("not"):
            self._advance()
            return Junction(word="not", parts=(self._negation(depth + 1),))
        if (self.kind, self.value) == ("sign", "("):
            self._advance()
            inner = self.disjunction(depth + 1)
            self._take(")")
            return inner
        return self._comparison()

    def _comparison(self) -> Condition:
        left = self._operand()
        if self._word("in"):
            self._advance()
            return Member(column=self._needs_column(left), literals=self._literals())
        if self.kind != "sign" or self.value not in (*COMPARISONS, *MATCHES):
            raise self.unexpected("a comparison (= != < <= > >= ~ !~ in)")
        sign = self.value
        self._advance()
        right = self._operand()
        if sign in MATCHES:
            return Match(column=self._needs_column(left), pattern=_pattern(right), found=sign == "~")
        if left.name is None:
            self._needs_column(right)
        return Comparison(left=left, sign=sign, right=right)

    def _needs_column(self, operand: Operand) -> Operand:
        if operand.name is None:
            raise UserError(f"--where: {operand} is compared with no column: {self._text}")
        return operand

    def _literals(self) -> tuple[Operand, ...]:
        self._take("(")
        literals = [self._literal()]
        while (self.kind, self.value) == ("sign", ","):
            self._advance()
            literals.append(self._literal())
        self._take(")")
        return tuple(literals)

    def _literal(self) -> Operand:
        operand = self._operand()
        if operand.name is not None:
            raise UserError(f"--where: {operand} in a list: only numbers and quoted texts may stand there")
        return operand

    def _operand(self) -> Operand:
        kind, value = self.kind, self.value
        if kind == "number":
            self._advance()
            return Operand(literal=int(value) if re.fullmatch(r"[-+]?\d+", value) else float(value))
        if kind == "text":
            self._advance()
            return Operand(literal=re.sub(r"\\(.)", _unescape, value[1:-1]))
        if kind != "name" or value in ("and", "or", "not", "in"):
            raise self.unexpected("a column, a number or a quoted text")
        self._advance()
        if (self.kind, self.value) != ("sign", "("):
            return Operand(name=value)
        return self._reduction(value)

    def _reduction(self, reduction: str) -> Operand:
        if reduction not in REDUCTIONS:
            raise UserError(f"--where: no function {reduction!r}; there are {', '.join(REDUCTIONS)}")
        self._advance()
        if self.kind != "name":
            raise self.unexpected("a token column")
        name = self.value
        self._advance()
        self._take(")")
        return Operand(name=name, reduction=reduction)


def _unescape(match: re.Match[str]) -> str:
    """A backslash escapes quotes and itself; before anything else it stays, for regular expressions."""
    return match[1] if match[1] in "\"'" else match[0]


def _pattern(operand: Operand) -> re.Pattern[str]:
    if not isinstance(operand.literal, str):
        raise UserError(f"--where: ~ {operand}: a quoted regular expression must stand there")
    return compile_pattern(operand.literal, "--where")


def compile_pattern(text: str, place: str, *, ignore_case: bool = False) -> re.Pattern[str]:
    """A user's regular expression. Raises UserError naming the place."""
    try:
        return re.compile(text, re.IGNORECASE if ignore_case else 0)
    except re.error as error:
        raise UserError(f"{place}: {text!r} is no regular expression: {error}") from error
