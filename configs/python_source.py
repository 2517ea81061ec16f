"""Python files as syntax trees."""

from __future__ import annotations

import ast

TRIES = 5


def parsed(text: str) -> ast.Module:
    """The tree of a Python file. Raises SyntaxError, ValueError or RecursionError for what is none.

    CPython 3.11 counts the depth of trees for all threads together and refuses a good file with SystemError when
    two of them parse at once (Prefect's threads do): such a try says nothing about the file.
    """
    for _ in range(TRIES - 1):
        try:
            return ast.parse(text)
        except SystemError:
            continue
    return ast.parse(text)
