"""Mistakes of the user: the command line prints their message as one line and exits with 2."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """A user's mistake. The message is one line: the value, its place and the remedy."""

    problems: tuple[str, ...] = ()
    """Where several mistakes were found at once: each in a line. The message is the first one and their number."""


class ConfigError(UserError):
    """A mistake in the configuration."""


def refuse(problems: Iterable[str], *, source: str = "") -> None:
    """Raises ConfigError where there is a problem; it carries all of them.

    source: what every line names first; empty: nothing.
    """
    lines = tuple(one_line(f"{source}: {problem}" if source else problem) for problem in problems)
    if lines:
        error = ConfigError(lines[0] if len(lines) == 1 else f"{lines[0]} (and {len(lines) - 1} more)")
        error.problems = lines if len(lines) > 1 else ()
        raise error


def one_line(text: str) -> str:
    """The text without line ends, as `printable`; words longer than any path keep their beginning and end."""
    words = (word if len(word) <= 500 else f"{word[:80]}…{word[-40:]}" for word in text.split())
    return " ".join(map(printable, words))


def printable(text: str) -> str:
    """Anybody's text for a terminal: control characters, but for line ends and tabs, as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def shown(value: object, *, max_characters: int = 60) -> str:
    """The value for a message, cut to a readable length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits, which Python does not write out
        text = f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= max_characters else f"{text[: max_characters - 1]}…"


def suggestion(word: str, valid: Iterable[str], *, noun: str = "one") -> str:
    """`did you mean X?` when a valid word is close, whatever its case, else the valid words."""
    valid = sorted(valid)
    by_lower = {name.lower(): name for name in valid}
    close = get_close_matches(word[:100], valid, n=1, cutoff=0.6)
    close += [by_lower[name] for name in get_close_matches(word[:100].lower(), by_lower, n=1, cutoff=0.6)]
    if close:
        return f"did you mean {close[0]}?"
    return f"there is no {noun} here" if not valid else f"valid: {', '.join(valid)}"
