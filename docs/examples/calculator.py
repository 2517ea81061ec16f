"""An environment with a tool: the model may ask a calculator before it answers.

    question --> <calc>17 * 3</calc> --> 51 --> answer: 51

Run it with `hybridflow run calculator.yaml` from this folder; docs/extending.md explains the protocol.
"""

import ast
import operator
import re
from typing import Any

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


class Calculator:
    """One question. The episode ends with an answer; a correct one earns 1, each use of the tool costs `cost`."""

    def __init__(self, cost: float = 0.0) -> None:
        self.cost = cost

    def reset(self, row: dict[str, Any], seed: int) -> tuple[str | None, dict[str, str]]:
        self.answer = str(row["answer"])
        return None, {"state": "question"}  # None: the prompt of the data set is the first observation

    def step(self, action: str, token_ids: list[int]) -> tuple[str, float, bool, dict[str, str]]:
        called = re.search(r"<calc>(.*?)</calc>", action, re.DOTALL)
        answered = re.search(r"answer:\s*(-?\d+)", action, re.IGNORECASE)
        if called and not (answered and answered.start() < called.start()):
            result = calculate(called.group(1))
            return f"{result}\n", -self.cost, False, {"state": result}
        reward = 1.0 if answered and answered.group(1) == self.answer else 0.0
        return "", reward, True, {}


def calculate(expression: str) -> str:
    """The value of an expression of whole numbers, or what is wrong with it; nothing is executed."""
    try:
        return str(value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError) as error:
        return f"error: {error}"


def value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**12:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    raise ValueError("only +, -, * and // of whole numbers")
